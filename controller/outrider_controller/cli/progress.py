"""Progress of anything long: a bar on a terminal, a line every ten per cent elsewhere. On stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider_controller.cli.output import note

Report = Callable[[int, str], None]
"""Done so far, and a short note."""


@contextmanager
def progress(label: str, total: int) -> Iterator[Report]:
    """Yields what to call with the number done. May be called often."""
    if sys.stderr.isatty():
        with _bar(label, total) as report:
            yield report
    else:
        yield Lines(label, total)


@contextmanager
def _bar(label: str, total: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    parts = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*parts, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total, note="")
        yield lambda done, text: bars.update(task, completed=done, note=text)


class Lines:
    """One line when another tenth is done."""

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
