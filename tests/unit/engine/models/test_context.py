"""How many positions a config gives, and which fields of its rotary embedding are taken."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from outrider.checkpoint_files import engine_fault
from outrider.engine.models.context import context_len
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from tests.unit.engine.test_supported_models import COMMON

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def read(directory: Path, kind: str = "qwen2", **settings: Any) -> Any:
    """The config of a file, as a person writes it."""
    (directory / "config.json").write_text(json.dumps({**COMMON, "model_type": kind, **settings}))
    return AutoConfig.from_pretrained(directory)


@pytest.mark.parametrize(
    ("kind", "settings", "positions", "line"),
    [
        # As Qwen's model cards have it.
        ("qwen2", {"rope_scaling": YARN}, 1024, "original_max_position_embeddings times the factor 4.0"),
        ("qwen3", {"rope_parameters": YARN | {"rope_theta": 1e6}}, 1024, "max_position_embeddings says 256"),
        ("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 1024}, 1024, ""),
        ("qwen2", {"rope_scaling": YARN, "max_position_embeddings": 4096}, 4096, "factor 4.0 .* adds none"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2}}, 512, "times the factor 2"),
        (
            "olmo3",
            {"rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default"}}, "layer_types": [FULL, SLIDING, FULL]},
            1024,
            "times the factor 4.0",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            1024,
            "max_position_embeddings times the factor",
        ),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 256, "factor 8.0 .* adds none"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 256, "factor 4.0 .* adds none"),
        (
            "llama",
            {"rope_scaling": YARN | {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            256,
            "factor 4.0 .* adds none",
        ),
        (
            "phi3",
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
                "original_max_position_embeddings": 64,
                "sliding_window": None,
            },
            64,
            "64 of the model's 256 positions are served: its rotary embedding",
        ),
    ],
)
def test_a_scaled_rotary_embedding_lengthens_the_context_or_a_line_says_why_not(
    kind: str, settings: dict[str, Any], positions: int, line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.engine.models.context")
    config = read(tmp_path, kind, **settings)
    caplog.clear()
    assert context_len(config) == positions
    said = " ".join(caplog.messages)
    assert re.search(line, said) if line else not said


ROTARY: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
VALUES: dict[str, Any] = {
    "rope_theta": 5e5,
    "factor": 3.0,
    "original_max_position_embeddings": 200,
    "attention_factor": 2.5,
    "beta_fast": 3.0,
    "beta_slow": 2.0,
    "short_factor": [3.0] * 8,
    "long_factor": [7.0] * 8,
    "low_freq_factor": 1.5,
    "high_freq_factor": 2.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "truncate": False,
    "partial_rotary_factor": 0.5,
}
# Texts alone rotate by one position, whatever the sections.
EXEMPT = {"rope_type", "mrope_section"}


def frequencies(rope: dict[str, Any]) -> list[torch.Tensor]:
    """Of short texts and long ones, with the scale of what is rotated."""
    config = AutoConfig.for_model("llama", **COMMON, rope_parameters=copy.deepcopy(rope))
    kind = rope["rope_type"]
    if kind == "default":
        # transformers' Llama reads the base alone.
        return [torch.tensor(config.rope_parameters["rope_theta"])]
    found = [ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length) for length in (8, 900)]
    return [torch.cat([frequencies, torch.tensor([scale])]) for frequencies, scale in found]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("field", sorted(get_type_hints(RopeParameters).keys() - EXEMPT))
def test_a_field_of_a_rotary_embedding_has_its_effect_in_transformers_or_is_refused_by_name(
    kind: str, field: str
) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROTARY[kind]}
    changed = {**rope, field: VALUES[field]}
    config = AutoConfig.for_model("llama", **COMMON, rope_parameters=copy.deepcopy(changed))
    # Half a head Llama cannot rotate, whatever computes the frequencies.
    if field != "partial_rotary_factor" and not same(frequencies(changed), frequencies(rope)):
        context_len(config)
    else:
        with pytest.raises(ValueError, match=f"rope_parameters: {field}: .* has no effect with rope_type {kind}"):
            context_len(config)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("llama", {"rope_scaling": YARN | {"attn_factor": 1.2}}, "attn_factor: 1.2 has no effect with rope_type yarn"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 1000}}, "alpha: 1000 has no effect"),
        ("llama", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0}}, "mscale: 0.7 has no effect"),
        (
            "llama",
            {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "attention_factor": 1.0}},
            "mscale: 0.7, mscale_all_dim: 1.0 has no effect",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 has no effect"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
        ("llama", {"rope_scaling": YARN | {"rope_type": "linear"}}, "type: 'yarn' has no effect with rope_type linear"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor: '4' is not a number"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": -4}}, "factor: -4 is not a number above 0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor: inf is not a number above 0"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta: nan is not a number above 0"),
        ("llama", {"rope_theta": 0.0}, "rope_theta: 0.0 is not a number above 0"),
        ("llama", {"max_position_embeddings": -1}, "max_position_embeddings: -1 positions"),
        ("llama", {"max_position_embeddings": 2**31}, "max_position_embeddings: 2147483648 positions"),
        ("llama", {"rope_parameters": {FULL: YARN}}, "has no effect beside full_attention"),
        (
            "olmo3",
            {
                "rope_parameters": {FULL: YARN | {"truncate": False}, SLIDING: {"rope_type": "default"}},
                "layer_types": [FULL, SLIDING, FULL],
            },
            "truncate: False has no effect",
        ),
    ],
)
def test_a_rotary_embedding_that_is_not_what_it_says_is_refused(
    kind: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, KeyError, TypeError), match=named):
        context_len(read(tmp_path, kind, **settings))


@pytest.mark.parametrize(
    ("kind", "settings", "line"),
    [
        ("llama", {"sliding_window": 40}, "sliding_window: 40 has no effect: a llama has none"),
        (
            "qwen2",
            {"final_logit_softcapping": 30.0, "mlp_bias": True},
            "final_logit_softcapping: 30.0, mlp_bias: True has no",
        ),
        (
            "gpt2",
            {"rope_scaling": YARN, "n_positions": 256},
            "rope_parameters: {'type': 'yarn'.* has no effect: a gpt2",
        ),
        ("mistral", {"sliding_window": 40}, ""),
        ("granite", {"logits_scaling": 4.0, "attention_bias": True}, ""),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": False}, ""),
    ],
)
def test_a_field_of_another_family_is_named_in_a_line(
    kind: str, settings: dict[str, Any], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read(tmp_path, kind, **settings)
    caplog.clear()
    context_len(config)
    said = " ".join(caplog.messages)
    assert re.search(line, said) if line else not said


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters: rope_type: rope_scaling is there too",
        ),
        ({"rope_scaling": YARN | {"rope_theta": 1e4}, "rope_theta": 1e6}, "rope_theta: 1000000.0, and 10000.0"),
        ({"rope_scaling": YARN, "rope_theta": 1e6}, ""),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 1e6}, "rope_theta": 1e6}, ""),
    ],
)
def test_two_places_that_differ_are_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    read(tmp_path, **settings)
    found = str(engine_fault(tmp_path) or "")
    assert named in found if named else not found


@pytest.mark.parametrize(
    "more", [{"finetuned": True}, {"mrope_section": [2, 3, 3]}, {"mscale": 1.0, "mscale_all_dim": 1.0}]
)
def test_fields_that_can_change_nothing_are_let_be(more: dict[str, Any], tmp_path: Path) -> None:
    assert context_len(read(tmp_path, rope_scaling=YARN | more)) == 1024
