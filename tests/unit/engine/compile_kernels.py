"""Compiles every kernel for a Hopper GPU, which needs none. Prints a line for each: name, registers spilt to memory.

Run in a process of its own: kernels are either interpreted or compiled, as the environment says when they are imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from outrider.engine import llama_kernels
from outrider.engine.attention import paged_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"*bf16": "query key value key_cache value_cache out residual delta weight qkv cos sin gate_up"}
POINTERS |= {"*fp32": "partial partial_max partial_sum", "fp32": "scale eps"}
POINTERS["*i64"] = "tile_start tile_count tile_blocks tile_own blocks visible own_mask slots positions"
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
HEADS = {"HEADS": 32, "HEAD_DIM": 128, "HEAD_PADDED": 128}


def cases() -> list[tuple[Any, dict[str, Any]]]:
    attend = HEADS | {"SHARE": 4, "BLOCK_SIZE": 16, "TILE_KEYS": 64, "WIDEN": False}
    few, many = {"TILE_ROWS": 16, "NUM_SPLITS": 16}, {"TILE_ROWS": 64, "NUM_SPLITS": 1}
    store = {"KV_HEADS": 8, "KV_HEADS_PADDED": 8, "HEAD_DIM": 128, "HEAD_PADDED": 128}
    return [
        *((paged_kernels.attend_kernel, attend | size | {"TREE": tree}) for size in (few, many) for tree in (0, 1)),
        (paged_kernels.reduce_kernel, HEADS | {"TILE_KEYS": 64, "NUM_SPLITS": 16}),
        (paged_kernels.store_kernel, store),
        (llama_kernels.norm_kernel, {"WIDTH": 4096, "PADDED": 4096, "ADD": True}),
        (llama_kernels.rotate_store_kernel, {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HALF_PADDED": 64}),
        (llama_kernels.gate_kernel, {"WIDTH": 14336, "BLOCK": 1024}),
    ]


def spilt_bytes(kernel: Any, constants: dict[str, Any]) -> int:
    """Of local memory that one thread of the compiled kernel uses."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    # As in service: tensors and strides are multiples of 16, which lets loads be wide.
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, kind in signature.items()
        if kind not in ("constexpr", "fp32")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=HOPPER)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found, usage
    return int(found[1]) + int(found[2])


if __name__ == "__main__":
    for kernel, constants in cases():
        sys.stdout.write(f"{kernel.__name__} {spilt_bytes(kernel, constants)}\n")
