"""Where the threads of a target's steps run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

PLACED = """
import os
from outrider.engine import EngineConfig
from outrider.target.config import TargetConfig
from outrider.target.process import place_threads
own, other = sorted(os.sched_getaffinity(0))[:2]
before = set(os.listdir("/proc/self/task"))
engine = EngineConfig(prefill_threads=3)
place_threads(TargetConfig(model="m", listen="127.0.0.1:0", engine=engine, threads=2, cpu_cores=(own,)))
started = sorted(map(int, set(os.listdir("/proc/self/task")) - before))
cores = [os.sched_getaffinity(thread) for thread in (0, *started)]
print(sum(c == {own} for c in cores), sum(other in c and own not in c for c in cores), len(cores))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_what_only_helps_with_prompts_keeps_off_the_targets_own_core() -> None:
    done = subprocess.run([sys.executable, "-c", PLACED], capture_output=True, text=True, timeout=120, check=True)
    on_own, on_others, threads = map(int, done.stdout.split())
    # Torch has threads of its own.
    assert on_others == 1 and on_own == threads - 1 >= 2
