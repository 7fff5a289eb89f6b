"""The kernels as ptxas makes them for a GPU that is not here: both compile, without a spill."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outrider.vllm import kernels

SIGNATURES = {
    "accept_kernel": {
        "sampled_ptr": "*i64", "sampled_stride": "i32", "num_sampled_ptr": "*i32", "drawn_ptr": "*i64",
        "drafted_ptr": "*i32", "starts_ptr": "*i32",
    },
    "follow_kernel": {
        "drafted_ptr": "*i64", "drafted_stride": "i32", "chains_ptr": "*i32", "chains_stride": "i32",
        "tokens_ptr": "*i32", "tokens_stride": "i32", "total_len_ptr": "*i32", "COUNT": "constexpr",
    },
}
for name, signature in SIGNATURES.items():
    source = ASTSource(getattr(kernels, name), signature, {"COUNT": 4} if "COUNT" in signature else {})
    made = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options={"num_warps": 1})
    print(name, len(made.asm["cubin"]), ".local" in made.asm["ptx"])
"""


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_kernels_compile_for_gpus(arch: int, tmp_path: Path) -> None:
    # Not in the interpreter, in which the other tests run.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM.replace("ARCH", str(arch))]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"(\w+_kernel) [1-9]\d+ (\w+)", said) == [("accept_kernel", "False"), ("follow_kernel", "False")]
