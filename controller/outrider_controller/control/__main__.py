"""python -m outrider_controller.control: the control plane in a process of its own, without Ray; see --help."""

from __future__ import annotations

import sys
from functools import partial

from outrider.extras import naming_extras
from outrider.metadata.checked import check_store

from outrider_controller.control.config import parse_arguments
from outrider_controller.control.server import control_process
from outrider_controller.process import run


def main() -> int:
    config = parse_arguments()
    check_store("outrider_controller.control", config.metadata_url)
    return run("control", config.log_format, partial(control_process, config))


if __name__ == "__main__":
    with naming_extras("outrider_controller.control", ""):
        sys.exit(main())
