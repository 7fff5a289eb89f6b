"""python -m tests.soak.hanging_target FILE ARGUMENTS...: a target whose step never returns once FILE is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from outrider.target.__main__ import main
from outrider.target.step.worker import TargetWorker


def hang_once(file: Path) -> None:
    """Takes the file away, so that the worker which is started again does not hang."""
    step = TargetWorker.step

    def hanging(worker: TargetWorker[Any]) -> float | None:
        while file.exists() and worker.load.num_running:
            file.unlink()
            time.sleep(3600)
        return step(worker)

    TargetWorker.step = hanging  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    hang_once(Path(sys.argv.pop(1)))
    sys.exit(main())
