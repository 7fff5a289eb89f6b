"""Each variant's products and attention against plain loops, in C: on this CPU, and on ARM in an emulator."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from outrider.engine.backends.cpu import runnable_variants
from outrider.engine.backends.cpu.build import FLAGS, SOURCES
from outrider.engine.backends.cpu.variants import VARIANTS

CHECK = Path(__file__).parent / "c" / "check_kernels.c"
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS_OF = {variant.name: variant.flags for variant in VARIANTS}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def check(compiler: str, flags: Sequence[str], program: Path, emulator: Sequence[str] = ()) -> None:
    own = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    command = [compiler, *own, *flags, f"-I{SOURCES}", str(CHECK), "-o", str(program), "-lm"]
    subprocess.run(command, check=True, timeout=200)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=200, check=False)
    if done.returncode == 2:
        pytest.skip("the system does not grant it")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
@pytest.mark.parametrize("variant", runnable_variants())
def test_on_this_cpu(variant: str, tmp_path: Path) -> None:
    check("cc", FLAGS_OF[variant], tmp_path / "check")


@pytest.mark.skipif(platform.machine() == "aarch64", reason="this CPU is one")
@pytest.mark.skipif(
    not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)), reason="no compiler or emulator: make test-aarch64"
)
def test_on_arm(tmp_path: Path) -> None:
    check(ARM_COMPILER, [*FLAGS_OF["portable"], "-static"], tmp_path / "check", [ARM_EMULATOR])
