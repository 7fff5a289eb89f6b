"""Progress of anything long: a line on stderr when another tenth is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider_controller.cli.output import note


class Progress:
    """Call it with the number done, as often as you like."""

    def __init__(
        self, label: str, total: int, write: Callable[[str], None] = note, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label = label
        self._total = max(total, 1)
        self._write = write
        self._clock = clock
        self._started_s = clock()
        self._tenths = 0

    def __call__(self, done: int, text: str) -> None:
        tenths = min(10 * done // self._total, 10)
        if tenths <= self._tenths:
            return
        self._tenths = tenths
        elapsed_s = self._clock() - self._started_s
        self._write(f"{self._label}: {10 * tenths} % ({done}/{self._total}, {elapsed_s:.0f} s) {text}".rstrip())
