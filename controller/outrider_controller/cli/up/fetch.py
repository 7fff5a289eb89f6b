"""python -m outrider_controller.cli.up.fetch MODEL WHAT: prints the model's directory, after fetching it if need be.

WHAT is the engine that is to run it, or `head` for a draft head. Refuses what cannot be run, as far as its config shows
it.
"""

from __future__ import annotations

import logging
import os
import sys

from outrider_controller.cli.models import HEAD, OUR_ENGINE


def main() -> int:
    # Bars of the libraries that download and convert would fill the lines we report. Read when they are imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # So would warnings of what they import.
    logging.disable(logging.WARNING)
    from outrider.engine import CheckpointError, resolve
    from outrider.engine.checkpoints.fetching import directory
    from outrider.engine.loading.loader import read_settings
    from outrider.heads.interface import HeadError
    from outrider.heads.loading import head_kind, read_head_config

    model, what = sys.argv[1:]
    try:
        path = (directory if what == HEAD else resolve)(model, lambda line: print(line, file=sys.stderr, flush=True))
        if what == OUR_ENGINE:
            read_settings(path)
        elif what == HEAD:
            head_kind(read_head_config(path), path)
        print(path)
    except (CheckpointError, HeadError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
