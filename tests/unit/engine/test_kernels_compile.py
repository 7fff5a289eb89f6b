"""The kernels are not only interpreted: Triton compiles them for the GPU they are meant for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the assembler in Triton's wheel is looked for on x86-64 only"
)
@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_without_spilling(interpreted: None, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spilt = [line.split() for line in done.stdout.splitlines()]
    assert len(spilt) == 9
    assert [line for line in spilt if line[1] != "0"] == []
