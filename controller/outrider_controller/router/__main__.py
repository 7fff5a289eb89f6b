"""python -m outrider_controller.router: a router in a process of its own, without Ray; see --help."""

from __future__ import annotations

import sys
from functools import partial

from outrider.extras import naming_extras
from outrider.metadata.checked import check_store

from outrider_controller.process import run
from outrider_controller.router.config import parse_arguments
from outrider_controller.router.process import router_process


def main() -> int:
    config = parse_arguments()
    check_store("outrider_controller.router", config.metadata_url)
    return run("router", config.log_format, partial(router_process, config))


if __name__ == "__main__":
    with naming_extras("outrider_controller.router", ""):
        sys.exit(main())
