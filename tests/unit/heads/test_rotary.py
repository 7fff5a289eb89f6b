"""The rotary embedding of heads as their config.json states it, in the forms of transformers 4 and 5."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.heads import HeadError
from outrider.heads.layer import Rotary
from outrider.heads.tensors import settings_of
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.unit.heads.test_formats import SHAPE

HEAD_DIM = SHAPE["head_dim"]
PLAIN = {name: value for name, value in SHAPE.items() if not name.startswith("rope")}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SECTIONS = {"mrope_section": [4, 6, 6]}

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing stated": ({}, {"rope_type": "default", "rope_theta": 1e4}),
    "theta": ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e6}),
    "llama3": (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "max_position_embeddings": 2048},
        {"rope_theta": 5e5, **LLAMA3},
    ),
    "both ways, as SpecForge writes it": (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, **LLAMA3},
    ),
    "yarn by its old name": (
        {"rope_theta": 1e6, "rope_scaling": YARN},
        {"rope_theta": 1e6, "rope_type": "yarn", **YARN},
    ),
    "yarn of a part of each head": (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", **YARN, "partial_rotary_factor": 0.5}},
        {"rope_theta": 1e6, "rope_type": "yarn", **YARN, "partial_rotary_factor": 0.5},
    ),
    "linear, of a part of each head": (
        {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    ),
    "of images": (
        {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", **SECTIONS}},
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "of images, in the new place": (
        {"rope_parameters": {"rope_type": "mrope", "type": "mrope", "rope_theta": 1e6, **SECTIONS}},
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "of images, lengthened": (
        {"rope_theta": 1e6, "rope_scaling": {**YARN, **SECTIONS}},
        {"rope_theta": 1e6, "rope_type": "yarn", **YARN},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_frequencies_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    stated, meant = FORMS[form]
    config = LlamaConfig(head_dim=HEAD_DIM, rope_parameters=dict(meant), max_position_embeddings=16384)
    if meant["rope_type"] == "default":
        frequencies, factor = 1.0 / meant["rope_theta"] ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[meant["rope_type"]](config, torch.device("cpu"))
    positions = torch.tensor([[0, 3, 500]])
    cos, sin = Rotary(settings_of({**PLAIN, "max_position_embeddings": 16384, **stated}, tmp_path))(positions)
    angles = positions[0, :, None] * torch.cat([frequencies, frequencies])
    torch.testing.assert_close(cos[0, 0], angles.cos() * factor)
    torch.testing.assert_close(sin[0, 0], angles.sin() * factor)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}, "rope_scaling: rope_type dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_scaling: rope_type longrope"),
        ({"rope_scaling": {"rope_type": "other", "factor": 2.0}}, "rope_scaling: rope_type other"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters: those of full_attention, sliding_attention",
        ),
        ({"rope_parameters": {"rope_theta": -1e4}}, "rope_parameters: rope_theta: -10000.0 is not a number above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps: -1e-06 is not a number above 0"),
        ({"num_attention_heads": 1.5}, "num_attention_heads: 1.5 is not a whole number above 0"),
    ],
)
def test_what_no_head_is_served_with_is_refused_by_its_field(
    stated: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(HeadError, match=rf"config\.json: {message}"):
        settings_of({**PLAIN, **stated}, tmp_path)


LONGROPE = {"type": "longrope", "short_factor": [1.5] * (HEAD_DIM // 2), "long_factor": [4.0] * (HEAD_DIM // 2)}


@pytest.mark.parametrize(
    ("stated", "turned", "factor"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1.0, 1.0),
        (
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 256},
            1.5,
            (1 + math.log(2) / math.log(256)) ** 0.5,
        ),
    ],
)
def test_our_own_heads_have_the_frequencies_of_texts_within_the_original_positions(
    stated: dict[str, Any], turned: float, factor: float, tmp_path: Path
) -> None:
    rotary = Rotary(settings_of({**PLAIN, "max_position_embeddings": 512, **stated}, tmp_path, ours=True))
    frequencies = 1.0 / (turned * 1e4 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    for positions in ([0, 3, 100], [0, 3, 900], [0, 3, 100]):
        angles = torch.tensor(positions)[:, None] * torch.cat([frequencies, frequencies])
        cos, sin = rotary(torch.tensor([positions]))
        torch.testing.assert_close(cos[0, 0], angles.cos() * factor)
        torch.testing.assert_close(sin[0, 0], angles.sin() * factor)
