"""A drafted tree, and what is kept of it, is the same on every rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from outrider.engine.loader import load_engine

from .ranks import CONFIG, play


@pytest.mark.slow
def test_two_ranks_compute_trees_as_one_does(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "logits"
    subprocess.run([sys.executable, "-m", f"{__package__}.ranks", str(tiny), str(file)], check=True, timeout=200)
    for got, want in zip(torch.load(file), play(load_engine(tiny, CONFIG)), strict=True):
        torch.testing.assert_close(got, want)
