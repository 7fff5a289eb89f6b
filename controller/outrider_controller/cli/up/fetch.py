"""python -m outrider_controller.cli.up.fetch MODEL ENGINE: prints the model's directory, after fetching it if need be.

Refuses what the engine does not run, as far as its config shows it.
"""

from __future__ import annotations

import os
import sys

from outrider_controller.cli.up.models import OUR_ENGINE


def main() -> int:
    # Bars of the libraries that download and convert would fill the lines we report. Read when they are imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from outrider.engine import CheckpointError, resolve
    from outrider.engine.models.loader import read_settings

    model, engine = sys.argv[1:]
    try:
        path = resolve(model, lambda line: print(line, file=sys.stderr, flush=True))
        if engine == OUR_ENGINE:
            read_settings(path)
        print(path)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
