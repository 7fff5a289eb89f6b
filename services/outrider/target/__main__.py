"""python -m outrider.target: see --help."""

from __future__ import annotations

import asyncio
import logging
import sys

from outrider.engine import CheckpointError
from outrider.target.config import parse_arguments
from outrider.target.process import limit_cpu, run


def main() -> int:
    config = parse_arguments()
    logging.basicConfig(level=logging.INFO)
    limit_cpu(config)
    try:
        asyncio.run(run(config))
    except (CheckpointError, OSError) as error:
        print(f"outrider.target: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
