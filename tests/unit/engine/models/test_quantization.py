"""Quantized models: what they hold, what they say, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from outrider.drafters import load_drafter
from outrider.engine import CheckpointError, Engine, EngineConfig, Row
from outrider.engine.checkpoints.quantization import Float8Linear, Int4Linear, Int8Linear, check, quantize
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.memory import (
    DoesNotFit,
    LinearWeights,
    Need,
    Quantized,
    count_linear,
    held_bytes,
    kv_blocks,
)
from outrider.sim.pair import Pair
from outrider.speculation import SamplingParams
from torch import nn
from transformers import AutoModelForCausalLM

ON_A_CPU = ["int8", "int4"]
PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41, 90, 91, 92]
GB = 10**9


def config(quantization: str, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(dtype=dtype, quantization=quantization, num_blocks=128)


def logits(engine: Engine, parts: list[int]) -> torch.Tensor:
    """Of every position of the prompt, run in parts of these sizes."""
    sequence = engine.kv.open([])
    found = []
    for size in parts:
        start = sequence.cached_len
        found.append(engine.forward([Row(sequence, PROMPT[start : start + size], size)]))
    engine.kv.close(sequence)
    return torch.cat(found)


@pytest.mark.parametrize(("quantization", "off_by"), [("int8", 0.05), ("int4", 0.5)])
def test_logits_are_near_those_of_the_plain_model_and_not_the_same(
    tiny: Path, quantization: str, off_by: float
) -> None:
    plain = logits(load_engine(tiny, config("none")), [13])
    quantized = logits(load_engine(tiny, config(quantization)), [13])
    relative = float((quantized - plain).norm() / plain.norm())
    assert 1e-4 < relative < off_by


@pytest.mark.parametrize("quantization", ON_A_CPU)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_over_several_positions_gives_the_bits_of_single_steps(
    tiny: Path, quantization: str, dtype: str
) -> None:
    if dtype == "float32" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("which shapes sum alike in torch is known of AVX-512 only")
    engine = load_engine(tiny, config(quantization, dtype))
    single = logits(engine, [1] * 13)
    assert torch.equal(single, logits(engine, [4, 5, 4]))
    assert torch.equal(single, logits(engine, [13]))


@pytest.mark.parametrize("quantization", ON_A_CPU)
def test_a_step_without_logits_runs(tiny: Path, quantization: str) -> None:
    engine = load_engine(tiny, config(quantization))
    assert engine.forward([Row(engine.kv.open([]), PROMPT, 0)]).shape == (0, 384)


# Greedy: each target with a plain draft and with a draft of its kind.
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        *((target, draft) for target in ON_A_CPU for draft in ("none", target)),
        *(pytest.param(*mixed, marks=pytest.mark.slow) for mixed in itertools.permutations(ON_A_CPU, 2)),
    ],
)
@pytest.mark.parametrize(
    "params",
    [pytest.param(None, marks=pytest.mark.slow), SamplingParams(temperature=0.8, seed=5)],
    ids=["greedy", "coupled"],
)
def test_a_quantized_target_says_the_same_with_and_without_speculation(
    tiny: Path, target: str, draft: str, params: SamplingParams | None
) -> None:
    drafter = load_drafter(tiny, engine=config(draft))
    # Rows are free here: what they really cost depends on the machine and on what else runs on it.
    pair = Pair(load_engine(tiny, config(target)), drafter, max_sequences=5, row_price=lambda _: 0.0)
    prompts = [[40 + number, *PROMPT] for number in range(7)]
    plain = pair.answer(prompts, 24, speculate=False, params=params)
    speculative = pair.answer(prompts, 24, speculate=True, params=params)
    assert [a.token_ids for a in plain] == [a.token_ids for a in speculative]
    assert sum(a.num_accepted for a in speculative) > 0


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 5)])
def test_linear_layers_take_as_many_bits_as_their_name_says(tiny: Path, quantization: str, bits: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    before, linear = held_bytes(model), count_linear(tiny)
    quantize(model, quantization)
    saved = before - held_bytes(model)
    # A tied head is stored with the embedding before, and by itself after.
    rest = before - 2 * linear.stored
    taken = (before - saved - rest) * 8 / linear.used
    assert bits <= taken < bits + 0.6


def test_int8_rows_are_within_half_a_step_of_their_weights() -> None:
    linear = nn.Linear(64, 32, bias=True).requires_grad_(False)
    quantized = Int8Linear.of(linear)
    restored = quantized.weight.float() * quantized.scale[:, None]
    assert bool(((restored - linear.weight).abs() <= 0.5001 * quantized.scale[:, None]).all())
    x = torch.randn(3, 2, 64)
    expected = x @ restored.T + linear.bias
    assert torch.allclose(quantized(x), expected, atol=1e-5)


def test_fp8_rows_are_within_half_a_step_of_their_weights_and_none_is_beyond_the_largest_number() -> None:
    linear = nn.Linear(64, 32, bias=True, dtype=torch.bfloat16).requires_grad_(False)
    linear.weight[3], linear.weight[4, 5:] = 0, 0
    quantized = Float8Linear.of(linear)
    steps = linear.weight.double() / quantized.scale.double()[:, None]
    # Three bits of mantissa; below the smallest normal number, 2 ** -6, steps are even.
    allowed = (steps.abs() / 16).clamp_min(2.0**-10) * 1.0001
    assert bool(((quantized.weight.double() - steps).abs() <= allowed).all())
    assert bool((quantized.weight.float().abs().amax(1)[[0, 4, 31]] == 448).all())
    x = torch.randn(3, 2, 64, dtype=torch.bfloat16)
    expected = x.float() @ (quantized.weight.float() * quantized.scale[:, None]).T + linear.bias.float()
    assert torch.allclose(quantized(x).float(), expected, atol=0.02)


def restored(layer: Int4Linear) -> torch.Tensor:
    grid = layer.grids(layer.group).repeat_interleave(layer.group, 1)
    return (layer.numbers() - grid[..., 1].float()) * grid[..., 0].float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_fp8_that_torch_multiplies_are_scaled_before_they_are_summed(dtype: torch.dtype) -> None:
    x = torch.full((1, 4096), 0.5, dtype=dtype)
    layer = Float8Linear.of(torch.nn.Linear(4096, 8, bias=False, dtype=dtype))
    layer.weight.fill_(448.0)
    want = 0.5 * 448 * 4096 * layer.scale[None]
    assert not torch.isfinite(torch.tensor(0.5 * 448 * 4096, dtype=torch.float16))
    torch.testing.assert_close(layer(x).float(), want, rtol=0.01, atol=0)


def test_int4_groups_are_nearer_to_their_weights_than_levels_from_least_to_largest() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 48).requires_grad_(False)
    linear.weight[3, 32:64] = 25.0
    quantized = Int4Linear.of(linear)
    assert quantized.numbers().max() <= 15
    w = linear.weight.view(48, -1, 32)
    step = (w.amax(-1, keepdim=True) - w.amin(-1, keepdim=True)) / 15
    plain = ((w - w.amin(-1, keepdim=True)) / step.clamp_min(1e-8)).round() * step + w.amin(-1, keepdim=True)
    meant = restored(quantized)
    assert (meant - linear.weight).norm() < 0.97 * (plain - w).norm()
    assert torch.allclose(meant[3, 32:64], torch.tensor(25.0), rtol=1e-3)
    x = torch.randn(3, 2, 128)
    assert torch.allclose(quantized(x), x @ meant.T + linear.bias, atol=1e-5)


def test_weights_that_are_on_a_grid_of_16_levels_stay_as_they_are() -> None:
    torch.manual_seed(0)
    q = torch.randint(0, 16, (32, 4, 32))
    q[..., 0], q[..., 1] = 0, 15
    linear = nn.Linear(128, 32).requires_grad_(False)
    step = torch.rand(32, 4, 1) + 0.5
    linear.weight.copy_(((q - 15 * torch.rand(32, 4, 1)) * step).flatten(1))
    away = restored(Int4Linear.of(linear)) - linear.weight
    assert float((away.view(32, 4, 32) / step).abs().max()) < 0.02


def test_layers_that_int4_cannot_hold_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(64, 24), nn.Linear(64, 32)).requires_grad_(False)
    before = [layer.weight.data_ptr() for layer in model]
    quantize(model, "int4")
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, Int4Linear]
    assert [layer.weight.data_ptr() for layer in model][:2] == before[:2]


def test_what_cannot_run_here_is_refused_by_the_fields_name(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="quantization: fp8 needs a GPU"):
        load_engine(tiny, EngineConfig(quantization="fp8"))
    with pytest.raises(CheckpointError, match="quantization: int8 is not supported on meta"):
        check("int8", "meta")
    with pytest.raises(ValueError, match="quantization: 'int3' is not one of none, int8, int4, fp8"):
        EngineConfig(quantization="int3")
    with pytest.raises(ValueError, match="execution: fused joins plain weights"):
        EngineConfig(quantization="int8", execution="fused")


def test_the_sum_before_loading_knows_the_bits_and_the_moment_before() -> None:
    linear = Quantized("int4", LinearWeights(used=8 * GB, stored=7 * GB), 0.625)
    need = Need("llama", 8 * GB, 2, "bfloat16", block_bytes=10**6, context_blocks=10, quantized=linear)
    assert (need.loaded_bytes, need.weight_bytes) == (16 * GB, 2 * GB + 5 * GB)
    assert kv_blocks(need, 20 * GB, "cuda", blocks=11_000, kv_bytes=None) == 11_000
    with pytest.raises(DoesNotFit, match=r"16\.0 GB while they are read and 7\.0 GB in int4"):
        kv_blocks(need, 16 * GB, "cuda", blocks=1, kv_bytes=None)


def test_linear_weights_are_counted_from_the_headers(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    layers = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    head = model.get_output_embeddings().weight.numel()
    assert count_linear(tiny) == LinearWeights(used=layers, stored=layers - head)
