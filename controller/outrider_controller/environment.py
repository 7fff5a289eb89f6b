"""What Ray must find in the environment before it is imported."""

from __future__ import annotations

import os
import secrets


def prepare_ray(address: str = "") -> None:
    """Settings for a private Ray on this machine; for a cluster at `address`, which has its own, few. Call it before
    anything imports ray, which reads them then."""
    if address:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        return
    os.environ.update(
        {
            # Ray unpickles what reaches its ports: only holders of a token made for this run may speak to them.
            # Set explicitly, because a mismatch between processes only says "failed to connect".
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # The switch that makes Ray listen on the loopback interface only. Its name tells where it is the default;
            # an address given to ray.init does not do it, for Ray replaces 127.0.0.1 by the machine's own.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_COLOR_PREFIX": "0",
            # Ray waits so long for the port of its server, which takes a tenth of a second to open it. Nothing of ours
            # runs meanwhile, not even the thread that sees the server die.
            "RAY_gcs_server_port_wait_time_s": "10",
        }
    )
    # A cluster of somebody else's is not ours to join.
    os.environ.pop("RAY_ADDRESS", None)
