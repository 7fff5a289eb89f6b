"""Environment variables that must be set before Ray is imported."""

from __future__ import annotations

import os
import secrets


def prepare_ray(address: str = "") -> None:
    """Sets the variables for a private Ray on this machine; only few for a cluster at `address`, which has its own
    settings. Must be called before ray is imported, which reads them then."""
    if address:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        return
    os.environ.update(
        {
            # Ray unpickles what it receives on its ports: only holders of this run's token may connect.
            # Set explicitly, because a mismatch between processes only says "failed to connect".
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # Makes Ray listen on the loopback interface only. Its name names the systems where it is the default. An
            # address given to ray.init is not enough, because Ray replaces 127.0.0.1 by the machine's own.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_COLOR_PREFIX": "0",
            # Longest wait for the port of Ray's server, which opens it within a tenth of a second. Meanwhile no Python
            # of ours runs, not even the thread that would notice the server's death.
            "RAY_gcs_server_port_wait_time_s": "10",
        }
    )
    # Otherwise Ray would join the cluster that this variable names.
    os.environ.pop("RAY_ADDRESS", None)
