"""python -m outrider.gateway"""

from __future__ import annotations

import asyncio
import os
import sys

from outrider.extras import naming_extras


def main() -> int:
    # Imported here, where a missing package is named.
    from outrider.gateway.config import parse_arguments
    from outrider.gateway.server import serve
    from outrider.metadata.checked import check_store
    from outrider.rpc.server import STOP_SIGNALS
    from outrider.telemetry.logging import configure_logging

    config = parse_arguments()
    configure_logging("gateway", config.log_format)
    check_store("outrider.gateway", config.metadata_url)
    # TokenizerThreads divides the cores among prompts. In the library's own pool a short prompt waits for a long one.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        asyncio.run(serve(config, STOP_SIGNALS))
    except OSError as error:
        print(f"outrider.gateway: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with naming_extras("outrider.gateway", "gateway"):
        sys.exit(main())
