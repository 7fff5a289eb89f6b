"""python -m outrider.target: see --help."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

from outrider.engine import CheckpointError
from outrider.target.config import TargetConfig, parse_arguments
from outrider.telemetry.logging import configure_logging
from outrider.telemetry.ops import Ops


def main() -> int:
    config = parse_arguments()
    if config.runs_on == "vllm":
        # A program of its own, with the same options: this one, and all that imports it, knows nothing of vLLM.
        os.execv(sys.executable, [sys.executable, "-m", "outrider.vllm", *sys.argv[1:]])
    configure_logging("target", config.log_format)
    return _one(config) if config.tensor_parallel == 1 else _several(config)


def _one(config: TargetConfig) -> int:
    from outrider.target.process import run

    try:
        asyncio.run(run(config))
    except (CheckpointError, OSError) as error:
        print(f"outrider.target: {error}", file=sys.stderr)
        return 1
    return 0


def _several(config: TargetConfig) -> int:
    # This process only starts the ranks.
    from outrider.target.rank import run_rank
    from outrider.target.supervisor import Supervisor

    ops = Ops("target-supervisor", config)
    run, listen = partial(run_rank, config), config.supervisor_ops_listen
    try:
        return Supervisor(config.tensor_parallel, config.step_timeout_s, run, ops, listen).run()
    except OSError as error:
        print(f"outrider.target: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
