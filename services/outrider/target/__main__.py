"""python -m outrider.target: see --help."""

from __future__ import annotations

import asyncio
import os
import sys

from outrider.extras import naming_extras
from outrider.target.config import parse_arguments
from outrider.telemetry.logging import configure_logging


def main() -> int:
    config = parse_arguments()
    if config.runs_on == "vllm":
        # A program of its own, with the same options: this one, and all that imports it, knows nothing of vLLM.
        os.execv(sys.executable, [sys.executable, "-m", "outrider.vllm", *sys.argv[1:]])
    configure_logging("target", config.log_format)
    if config.metadata_url:
        from outrider.metadata.checked import check_store

        check_store("outrider.target", config.metadata_url)
    # Imported here: torch and transformers take seconds, in which nobody should wait for --help.
    from outrider.engine import CheckpointError
    from outrider.target.process import run

    try:
        asyncio.run(run(config))
    except (CheckpointError, OSError) as error:
        print(f"outrider.target: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with naming_extras("outrider.target", "engine"):
        sys.exit(main())
