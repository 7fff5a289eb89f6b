"""python -m outrider_controller.cli.up.fetch MODEL: prints the model's directory, after fetching it if need be."""

from __future__ import annotations

import os
import sys


def main() -> int:
    # Bars of the libraries that download and convert would fill the lines we report. Read when they are imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from outrider.engine import CheckpointError, resolve

    try:
        print(resolve(sys.argv[1], lambda line: print(line, file=sys.stderr, flush=True)))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
