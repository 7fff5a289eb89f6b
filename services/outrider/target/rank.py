"""One rank of a tensor-parallel target: rank 0 serves like any other target, the others follow it. Only wiring."""

from __future__ import annotations

import asyncio
import os
import sys

import torch

from outrider.engine import CheckpointError
from outrider.engine.parallel.follower import follow
from outrider.engine.parallel.group import Group, Place
from outrider.engine.parallel.links import PeerGone
from outrider.engine.parallel.watchdog import EXIT_BROKEN
from outrider.target.config import TargetConfig
from outrider.telemetry.logging import configure_logging


def run_rank(config: TargetConfig, place: Place) -> int:
    """Runs until the group ends. Returns the exit code."""
    configure_logging("target", config.log_format)
    if torch.device(config.engine.device).type == "cpu":
        # Otherwise transformers would take the first accelerator it finds.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.cpu_cores:
        os.sched_setaffinity(0, config.cpu_cores)
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // place.size))
    group = Group(place)
    group.watchdog.start()
    try:
        if group.leads:
            _lead(group, config)
        else:
            follow(group, config.engine)
    except PeerGone:
        return EXIT_BROKEN
    except (CheckpointError, OSError) as error:
        print(f"outrider.target: {error}", file=sys.stderr)
        return 1
    return 0


def _lead(group: Group, config: TargetConfig) -> None:
    # Not before: followers need no gRPC.
    from outrider.target.process import run

    asyncio.run(run(config, group))
