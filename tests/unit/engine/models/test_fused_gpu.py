"""Llama's relatives as GPUs run them, in Triton's interpreter: transformers' logits, from chunks and trees."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import Engine, EngineConfig, Row
from outrider.engine.checkpoints.quantization import Float8Linear
from outrider.engine.loading.assembly import assemble
from outrider.engine.loading.loader import load_engine, read_settings
from outrider.engine.models.decoder import register_attention
from outrider.engine.models.fused_gpu import GpuLlama, can_fuse_on_gpu
from outrider.engine.models.probe import on_meta
from torch import nn
from transformers import AutoModelForCausalLM

from tests.unit.engine.test_native_families import FAMILIES, drawn_vectors
from tests.unit.engine.test_supported_models import made

pytestmark = pytest.mark.usefixtures("interpreted")

FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "phi3": ("phi3", {"sliding_window": 70, "head_dim": 96}),
    "mistral": ("mistral", {"sliding_window": 70, "head_dim": 64}),
    **{name: FAMILIES[name] for name in ("all biases", "qwen2", "qwen3", "qwen3 with biases")},
}
TEXT = [random.Random(i).randrange(3, 250) for i in range(100)]


def config(execution: str, device: str = "cpu") -> EngineConfig:
    return EngineConfig(
        dtype="float32",
        device=device,
        num_blocks=16,
        attention="triton",
        execution=execution,
        prefix_cache=False,
        max_context_len=128,
    )


@pytest.mark.parametrize(
    "name", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in FUSED]
)
def test_the_fused_execution_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    says_what_transformers_says(name, tmp_path, "cpu")


def says_what_transformers_says(name: str, directory: Path, device: str) -> None:
    kind, settings = FUSED[name]
    checkpoint = drawn_vectors(made(kind, {"pad_token_id": None, **settings}, directory))
    engine = load_engine(checkpoint, config("fused", device))
    assert isinstance(engine._decoder, GpuLlama)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        want = model(torch.tensor([TEXT])).logits[0].to(device)
    # Beyond the window, where there is one.
    sequence, at = engine.kv.open([]), 85 if "sliding_window" in settings else 13
    found = [engine.forward([Row(sequence, TEXT[:at], at)]).clone()]
    found.append(engine.forward([Row(sequence, TEXT[at : at + 4], 4)]))
    torch.testing.assert_close(torch.cat(found), want[: at + 4], atol=1e-4, rtol=1e-4)
    # A tree: the text goes on in its second branch.
    tree = engine.forward([Row(sequence, [TEXT[at + 4], 9, *TEXT[at + 5 : at + 7]], 4, parents=[-1, -1, 1])])
    torch.testing.assert_close(tree[[0, 2, 3]], want[at + 4 : at + 7], atol=1e-4, rtol=1e-4)


# In the quick tier the same is said of its parts: tests of products and of Triton's attention.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_has_the_same_logits_alone_in_a_batch_and_as_a_draft(dtype: str, tmp_path: Path) -> None:
    has_the_same_logits_alone_in_a_batch_and_as_a_draft(dtype, tmp_path, "cpu")


def has_the_same_logits_alone_in_a_batch_and_as_a_draft(dtype: str, directory: Path, device: str) -> None:
    checkpoint = drawn_vectors(made("llama", {"pad_token_id": None}, directory))
    has_the_same_bits_in_every_step(load_engine(checkpoint, replace(config("fused", device), dtype=dtype)))


def has_the_same_bits_in_every_step(engine: Engine) -> None:
    assert engine.info.execution.removesuffix("-w8") == "fused-cuda-invariant"
    alone, others = engine.kv.open([]), [engine.kv.open([]) for _ in range(4)]
    # One by one, after a prompt.
    want = [engine.forward([Row(alone, TEXT[:20], 1)]).clone()]
    want += [engine.forward([Row(alone, [token], 1)]).clone() for token in TEXT[20:23]]
    # The prompt in two parts, beside other texts; then all at once, in a chain, and in a tree.
    first, *rest = others
    engine.forward([Row(first, TEXT[:3], 1), *(Row(each, TEXT[n : n + 30], 1) for n, each in enumerate(rest))])
    beside = [Row(each, TEXT[:5], 5) for each in rest]
    found = [engine.forward([Row(first, TEXT[3:20], 1), *beside])[:1].clone()]
    found.append(engine.forward([Row(first, TEXT[20:23], 3), *beside])[:3].clone())
    assert torch.equal(torch.cat(found), torch.cat(want))
    engine.kv.rewind(first, 20)
    tree = Row(first, [9, TEXT[20], 7, *TEXT[21:23]], 5, parents=[-1, -1, 0, 1, 3])
    assert torch.equal(engine.forward([tree, *beside])[[1, 3, 4]], torch.cat(want[1:]))


@pytest.mark.slow
def test_weights_in_fp8_say_what_their_numbers_say(tmp_path: Path) -> None:
    checkpoint = drawn_vectors(made("llama", {"pad_token_id": None}, tmp_path))
    want = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).float()
    for linear in (module for module in want.modules() if isinstance(module, nn.Linear)):
        kept = Float8Linear.of(linear)
        linear.weight = nn.Parameter(kept.weight.float() * kept.scale[:, None])
    engine = in_fp8(checkpoint, "cpu")
    assert isinstance(engine._decoder, GpuLlama)
    products = [
        each for layer in engine._decoder._layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    assert {each.weight.dtype for each in (*products, engine._decoder._head)} == {torch.float8_e4m3fn}
    with torch.inference_mode():
        logits = want(torch.tensor([TEXT[:30]])).logits[0]
    found = engine.forward([Row(engine.kv.open([]), TEXT[:30], 30)])
    # transformers' own bfloat16 is 0.06 away from its float32 here, and plain weights are 0.25 away from those of fp8.
    assert float((found - logits).norm() / logits.norm()) < 0.1


@pytest.mark.slow
def test_with_weights_in_fp8_a_token_has_the_same_logits_in_every_step(tmp_path: Path) -> None:
    checkpoint = drawn_vectors(made("llama", {"pad_token_id": None}, tmp_path))
    has_the_same_bits_in_every_step(in_fp8(checkpoint, "cpu"))


def in_fp8(checkpoint: Path, device: str) -> Engine:
    """Loading asks the device for fp8, which a CPU has not."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation=register_attention()
    ).to(device)
    settings = replace(config("auto", device), dtype="bfloat16", quantization="fp8")
    return assemble(model, settings, num_blocks=16, max_context_len=128)


@pytest.mark.parametrize("name", ["smollm3", "olmo2", "granite", "gemma", "phi3, a part rotated"])
def test_relatives_with_more_than_the_kernels_do_are_not_fused(name: str, tmp_path: Path) -> None:
    kind, settings = FAMILIES[name]
    checkpoint = made(kind, {"pad_token_id": None, **settings}, tmp_path)
    assert not isinstance(load_engine(checkpoint, config("auto"))._decoder, GpuLlama)
    # So it is said before the weights are read.
    assert (model := on_meta(read_settings(checkpoint))) is not None and not can_fuse_on_gpu(model)
