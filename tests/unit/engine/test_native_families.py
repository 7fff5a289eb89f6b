"""Llama's relatives on the native kernels: transformers' logits, and the same bits in every shape of a step."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import Engine, EngineConfig, Row
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.quantization import quantize
from outrider.engine.loading.loader import load_engine
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.engine.test_supported_models import made

SLIDING, FULL = "sliding_attention", "full_attention"
BY_LAYER = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.5] * 8,
    "long_factor": [4.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 20, "head_dim": 64}),
    "qwen2": ("qwen2", {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen2, windows": (
        "qwen2",
        {"sliding_window": 70, "use_sliding_window": True, "max_window_layers": 1, "num_key_value_heads": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 128, "hidden_size": 80}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "rope_parameters": YARN, "num_key_value_heads": 1}),
    "phi3": ("phi3", {"head_dim": 96, "sliding_window": 3}),
    "phi3, a part rotated": (
        "phi3",
        {"head_dim": 64, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", {"head_dim": 32}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "attention_bias": True,
        },
    ),
    "gemma": ("gemma", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 33,
            "query_pre_attn_scalar": 24,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": BY_LAYER,
        },
    ),
}
FLOAT32 = EngineConfig(dtype="float32", execution="fused", num_blocks=64, prefix_cache=False)
# Of what differs outside the kernels each thing once: biases, windows in some layers, parts rotated, factors, norms.
_PLAIN = ("qwen2, windows", "qwen3 with biases", "phi3, a part rotated", "granite", "gemma3")
OUTSIDE_THE_KERNELS = pytest.mark.parametrize(
    "checkpoint",
    [name if name in _PLAIN else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
    indirect=True,
)
PROMPT = [random.Random(i).randrange(3, 250) for i in range(100)]
TREE = [50, 60, 51, 61, 70]
PARENTS = [-1, 0, -1, 1, 2]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, settings = FAMILIES[request.param]
    settings = {"pad_token_id": None, **settings}
    return drawn_vectors(made(kind, settings, tmp_path_factory.mktemp("family")))


def drawn_vectors(path: Path) -> Path:
    """Biases and norms that are not all 0 or all 1, everything in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def loaded(path: Path, variant: str, quantization: str = "none") -> Engine:
    settings = EngineConfig(
        execution="native", native_variant=variant, quantization=quantization, num_blocks=64, prefix_cache=False
    )
    return load_engine(path, settings)


def whole(engine: Engine) -> Tensor:
    return engine.forward([Row(engine.kv.open([]), PROMPT, len(PROMPT))]).clone()


def test_in_float32_its_logits_are_those_of_transformers(checkpoint: Path) -> None:
    engine = load_engine(checkpoint, FLOAT32)
    want = by_transformers(checkpoint, torch.float32)
    assert float((whole(engine) - want).abs().max()) < 1e-4 * float(want.abs().max())


@cache
def by_transformers(path: Path, dtype: torch.dtype, quantization: str = "none") -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    quantize(model, quantization)
    with torch.inference_mode():
        logits: Tensor = model.to(dtype)(torch.tensor([PROMPT])).logits[0].float()
    return logits


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_its_logits_are_those_of_transformers_up_to_rounding(checkpoint: Path, variant: str, quantization: str) -> None:
    got = whole(loaded(checkpoint, variant, quantization))
    want = by_transformers(checkpoint, torch.float32, quantization)
    # What transformers itself loses in bfloat16 is the measure.
    assert error(got, want) < 1.2 * error(by_transformers(checkpoint, torch.bfloat16, quantization), want)


def test_a_row_has_the_same_bits_in_every_shape_of_a_step(checkpoint: Path, variant: str) -> None:
    has_the_same_bits(loaded(checkpoint, variant))


@OUTSIDE_THE_KERNELS
def test_in_float32_too(checkpoint: Path) -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("which shapes sum alike in torch is known of AVX-512 only")
    has_the_same_bits(load_engine(checkpoint, FLOAT32))


def has_the_same_bits(engine: Engine) -> None:
    want = whole(engine)
    for size in (1, 2, 3, 5, 6, 7, 11, 16, 37):
        sequence = engine.kv.open([])
        parts = [PROMPT[start : start + size] for start in range(0, len(PROMPT), size)]
        got = [engine.forward([Row(sequence, part, len(part))]).clone() for part in parts]
        assert torch.equal(torch.cat(got), want), size
        engine.kv.close(sequence)


def test_a_node_of_a_tree_has_the_bits_of_a_chain(checkpoint: Path, variant: str) -> None:
    engine = loaded(checkpoint, variant)
    sequence = engine.kv.open([])
    engine.forward([Row(sequence, PROMPT, 0)])
    got = engine.forward([Row(sequence, TREE, len(TREE), parents=PARENTS)]).clone()
    for path in ([0, 1, 3], [2, 4]):
        chain = engine.kv.open([])
        engine.forward([Row(chain, PROMPT, 0)])
        want = engine.forward([Row(chain, [TREE[node] for node in path], len(path))])
        assert torch.equal(got[path], want)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
        ("gemma3_text", {"query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, "rope_type"),
        ("starcoder2", {}, "not starcoder2"),
    ],
)
def test_a_model_that_differs_otherwise_is_refused_by_name(
    kind: str, settings: dict[str, Any], reason: str, variant: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        loaded(made(kind, settings, tmp_path), variant)
