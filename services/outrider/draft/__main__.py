"""python -m outrider.draft: one draft worker in the foreground."""

from __future__ import annotations

import asyncio
import sys

from outrider.draft.config import parse_arguments
from outrider.extras import naming_extras
from outrider.telemetry.logging import configure_logging

# Switch interval between the step thread and the event loop. The default, 5 ms, exceeds a small draft's forward.
_SWITCH_INTERVAL_S = 0.0005


def main() -> int:
    config = parse_arguments()
    configure_logging("draft", config.log_format)
    if config.metadata_url:
        from outrider.metadata.checked import check_store

        check_store("outrider.draft", config.metadata_url)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # Imported here: torch and transformers take seconds, in which nobody should wait for --help.
    from outrider.draft.process import run
    from outrider.engine import CheckpointError

    try:
        asyncio.run(run(config))
    except (CheckpointError, OSError, ValueError) as error:
        print(f"outrider.draft: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with naming_extras("outrider.draft", "engine"):
        sys.exit(main())
