"""python -m outrider_controller: see --help."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from types import FrameType

from outrider.extras import naming_extras
from outrider.metadata.checked import check_store
from outrider.telemetry.logging import configure_logging

from outrider_controller.config import ControllerConfig, parse_arguments


def main() -> int:
    config = parse_arguments()
    configure_logging("controller", config.log_format)
    check_store("outrider_controller", config.router.metadata_url)
    stopping = _stop_on_signals()
    _prepare_ray(config.ray.address)
    return _run(config, stopping)


def _prepare_ray(address: str = "") -> None:
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
            # Otherwise Ray kills the actors when others have filled the machine's memory. They are small, and a router
            # takes all requests with it.
            "RAY_memory_monitor_refresh_ms": "0",
            # Ray would have the kernel end them before all else (1000).
            "RAY_worker_oom_score_adjustment": "0",
        }
    )
    # Otherwise Ray would join the cluster that this variable names.
    os.environ.pop("RAY_ADDRESS", None)


def _run(config: ControllerConfig, stopping: threading.Event) -> int:
    # Not earlier: ray reads the environment when it is imported.
    from outrider_controller.actors import StartError, running_controller
    from outrider_controller.cluster import joined_controller, stop_actors

    started = joined_controller if config.ray.address else running_controller
    try:
        if config.ray.stop_actors:
            stop_actors(config)
            return 0
        with started(config) as controller:
            # Again, because ray.init has replaced our signal handlers.
            _stop_on_signals(stopping)
            controller.run(stopping)
    except StartError as error:
        print(f"outrider_controller: {error}", file=sys.stderr)
        return 1
    return 0


def _stop_on_signals(stopping: threading.Event | None = None) -> threading.Event:
    """An event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    event = stopping or threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return event


if __name__ == "__main__":
    with naming_extras("outrider_controller", "controller"):
        sys.exit(main())
