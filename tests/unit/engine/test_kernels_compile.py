"""The kernels are not only interpreted: Triton compiles all that the engine launches for the GPUs they are meant for.

`kernel_bounds.json` keeps the registers of a thread, the blocks of a multiprocessor and the bytes that a thread spills
for each kernel, shape, dtype and card. `python tests/unit/engine/compile_kernels.py --write` makes it anew; a change of
it belongs to the change that causes it. What has not changed since an earlier run in this checkout is not compiled
again: `build/kernels.jsonl`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine.attention.paged import Shape, TritonAttention

SCRIPT = Path(__file__).with_name("compile_kernels.py")
BOUNDS = json.loads(Path(__file__).with_name("kernel_bounds.json").read_text())
# The next version of the compiler may need some more.
MORE_REGISTERS = 16

pytestmark = [
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="the assembler in Triton's wheel is looked for on x86-64 only"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    kept = Path("build/kernels.jsonl")
    kept.parent.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, SCRIPT, "--kept", kept], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_every_card_as_well_as_its_bounds_say(compiled: list[dict[str, Any]]) -> None:
    assert {(line["name"], str(line["arch"])) for line in compiled} == {
        (name, arch) for name, cards in BOUNDS.items() for arch in cards
    }
    worse = []
    for line in compiled:
        registers, blocks, spilt = BOUNDS[line["name"]][str(line["arch"])]
        if line["registers"] > registers + MORE_REGISTERS or line["blocks"] < blocks or line["spilt"] > spilt:
            worse.append(line)
    assert worse == []


def _of_layers(compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that choose a token, once a step: they keep settings for later while they read the logits."""
    return [line for line in compiled if line["kernel"] not in ("choose_kernel", "guess_kernel")]


def test_no_kernel_of_a_layer_spills_in_bfloat16(compiled: list[dict[str, Any]]) -> None:
    assert len(compiled) > 100
    assert [line for line in _of_layers(compiled) if line["spilt"] and "bf16" in line["name"]] == []


def test_of_layers_only_float32_with_heads_of_256_spills_more_than_one_register(compiled: list[dict[str, Any]]) -> None:
    # Three products of tf32 need a tile of queries twice, in the registers of each warp.
    float32 = "attend_kernel fp32 BLOCK_SIZE=16,HEADS=8,HEAD_DIM=256"
    # The assembler parks one address of a few kernels, to fit one more block on a multiprocessor.
    assert [line for line in _of_layers(compiled) if line["spilt"] > 8 and not line["name"].startswith(float32)] == []


def test_every_tile_fits_the_shared_memory_of_every_card(compiled: list[dict[str, Any]]) -> None:
    assert [line for line in compiled if not line["fits"]] == []


def test_attention_multiplies_on_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    attention = [line for line in compiled if line["kernel"] == "attend_kernel"]
    assert attention
    assert all(line["tensor_cores"] for line in attention)


def test_heads_that_no_card_takes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head_dim: 512"):
        TritonAttention(Shape(heads=8, kv_heads=4, head_dim=512, block_size=16), torch.device("cpu"))
    assert Shape(heads=8, kv_heads=4, head_dim=256, block_size=16).tile_keys == 32


def test_products_multiply_by_one_instruction_in_every_tile(compiled: list[dict[str, Any]]) -> None:
    # Another one, or another width of it, may add in another order.
    found = [line for line in compiled if line["kernel"] == "product_kernel"]
    assert {name.count("ROWS=16") + 2 * name.count("ROWS=128") for name in (line["name"] for line in found)} == {1, 2}
    for dtype in ("bf16", "fp16"):
        kinds = {tuple(line["tensor_cores"]) for line in found if f" {dtype}" in line["name"]}
        assert len(kinds) == 1
        assert "m16n8k16" in "".join(*kinds)
