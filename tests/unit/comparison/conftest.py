"""Comparisons of texts and of counted steps: the machine's own times are not looked at."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.fixture(autouse=True)
def caches_stay_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """To empty the CPU's caches after each step makes times true, and takes most of the time of these tests."""
    # The package has a function of the module's name.
    monkeypatch.setattr(import_module("outrider.comparison.compare"), "_SWEPT_BYTES", 4096)
