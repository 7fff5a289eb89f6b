"""python -m outrider_controller: see --help."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from outrider.telemetry.logging import configure_logging

from outrider_controller.config import ControllerConfig, parse_arguments
from outrider_controller.environment import prepare_ray


def main() -> int:
    config = parse_arguments()
    configure_logging("controller", config.log_format)
    stopping = _stop_on_signals()
    prepare_ray(config.ray.address)
    return _run(config, stopping)


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
    sys.exit(main())
