"""A real target with a switch to run every drafted row: python -m benchmarks.support.unpriced_target FILE OPTIONS.
OPTIONS are outrider.target's.

SIGUSR1: every row at any price; SIGUSR2: by price again, as shipped. At each signal it writes the cost of its steps so
far to FILE.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from pathlib import Path
from unittest import mock

from outrider.target import __main__ as target
from outrider.target import process
from outrider.target.step.own_engine import OwnEngine
from outrider.worker.step_cost import StepCost

from benchmarks.support.virtual_load import StepLine

EVERY_ROW, BY_PRICE = signal.SIGUSR1, signal.SIGUSR2


class Pricing:
    """The price of one target's rows: from the cost of its steps, or 0."""

    def __init__(self, file: Path) -> None:
        self.priced = True
        self._file = file
        self._cost = StepCost()

    def price(self, cost: StepCost) -> float:
        self._cost = cost
        return cost.price if self.priced else 0.0

    def switch(self, number: int, frame: object) -> None:
        self.priced = number == BY_PRICE
        line = step_line(self._cost)
        # Whoever reads meanwhile finds the file before.
        written = self._file.with_suffix(".new")
        written.write_text(json.dumps({"base_s": line.base_s, "row_s": line.row_s}))
        written.replace(self._file)


def step_line(cost: StepCost) -> StepLine:
    """The line fitted to the last steps."""
    return StepLine(max(0.0, cost._seconds - cost.row_s * cost._rows), cost.row_s)


def read_line(file: Path) -> StepLine:
    return StepLine(**json.loads(file.read_text()))


def main() -> int:
    pricing = Pricing(Path(sys.argv[1]))
    del sys.argv[1]
    for number in (EVERY_ROW, BY_PRICE):
        signal.signal(number, pricing.switch)
    with mock.patch.object(process, "OwnEngine", partial(OwnEngine, row_price=pricing.price)):
        return target.main()


if __name__ == "__main__":
    sys.exit(main())
