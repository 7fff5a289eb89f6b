"""python -m outrider.target: see --help."""

from __future__ import annotations

import asyncio
import sys

from outrider.engine import CheckpointError
from outrider.target.config import parse_arguments
from outrider.target.process import run
from outrider.telemetry.logging import configure_logging


def main() -> int:
    config = parse_arguments()
    configure_logging("target", config.log_format)
    try:
        asyncio.run(run(config))
    except (CheckpointError, OSError) as error:
        print(f"outrider.target: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
