"""A real target whose engine fails at every step from SIGUSR1 on, as with a CUDA context after an illegal access.

python -m benchmarks.support.failing_target OPTIONS. OPTIONS are outrider.target's.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from outrider.engine import Engine, Row
from outrider.target import __main__ as target
from torch import Tensor

FAIL = signal.SIGUSR1


def main() -> int:
    failing: list[int] = []
    signal.signal(FAIL, lambda number, frame: failing.append(number))
    forward = Engine.forward

    def dying(self: Engine, rows: Sequence[Row]) -> Tensor:
        if failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return forward(self, rows)

    Engine.forward = dying  # type: ignore[method-assign]
    return target.main()


if __name__ == "__main__":
    sys.exit(main())
