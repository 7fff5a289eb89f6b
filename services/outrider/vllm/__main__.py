"""python -m outrider.vllm: a target on vLLM. The options are those of `python -m outrider.target`."""

from __future__ import annotations

import asyncio
import sys

from outrider.extras import naming_extras
from outrider.target.config import parse_arguments
from outrider.telemetry.logging import configure_logging


def main() -> int:
    config = parse_arguments()
    configure_logging("target", config.log_format)
    if config.metadata_url:
        from outrider.metadata.checked import check_store

        check_store("outrider.target", config.metadata_url)
    # Imported here: vLLM takes seconds, and may be missing.
    from outrider.vllm import versions

    try:
        versions.check()
        from outrider.vllm.target.process import run

        asyncio.run(run(config))
    except (versions.UnsupportedVersion, ValueError, OSError, RuntimeError) as error:
        print(f"outrider.target: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with naming_extras("outrider.target", "vllm"):
        sys.exit(main())
