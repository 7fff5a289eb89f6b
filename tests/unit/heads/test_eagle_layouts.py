"""EAGLE-3 heads as they are published: their layouts, and what is wrong in their config.json."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from outrider.heads import Eagle3Head, HeadError, TargetParts, load_head
from outrider.heads.check import agreement, choose_taps
from outrider.heads.interface import ChainMemory
from outrider.heads.loading import is_head
from outrider.target.drafts.head import tried_head
from torch import Tensor

from tests.unit.engine.test_supported_models import made
from tests.unit.heads.test_formats import KNOWN, SHAPE, TOKENS, VOCAB, WIDTH, asked, rms, written

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 32, 80
LAYERS = 8


@pytest.fixture
def target() -> TargetParts:
    torch.manual_seed(0)
    return TargetParts(torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH), LAYERS)


def layer_of(number: int, *, bias: bool = False, qk_norm: bool = False) -> dict[str, Tensor]:
    """The tensors of one layer, under vLLM's names."""
    read = 2 * WIDTH if number == 0 else WIDTH
    widths = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    found = {f"self_attn.{name}.weight": torch.randn(width, read) * 0.1 for name, width in widths.items()}
    if bias:
        found |= {f"self_attn.{name}.bias": torch.randn(width) for name, width in widths.items()}
    if qk_norm:
        found |= {f"self_attn.{name}.weight": torch.rand(HEAD_DIM) + 0.5 for name in ("q_norm", "k_norm")}
    found["self_attn.o_proj.weight"] = torch.randn(WIDTH, HEADS * HEAD_DIM) * 0.1
    found |= {f"mlp.{name}.weight": torch.randn(INNER, WIDTH) * 0.1 for name in ("gate_proj", "up_proj")}
    found["mlp.down_proj.weight"] = torch.randn(WIDTH, INNER) * 0.1
    norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if number == 0 else [])]
    return found | {f"{name}.weight": torch.rand(WIDTH) + 0.5 for name in norms}


def attention(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal, with rotary positions, written out. x [tokens, inputs]"""

    def heads(name: str, count: int) -> Tensor:
        out = x @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", torch.zeros(()))
        out = out.view(len(x), count, HEAD_DIM)
        if (norm := layer.get(f"self_attn.{name}_norm.weight")) is not None:
            out = torch.nn.functional.rms_norm(out, (HEAD_DIM,), norm, 1e-5)
        if name == "v":
            return out
        half = HEAD_DIM // 2
        angles = torch.arange(len(x))[:, None] * SHAPE["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = out[..., :half], out[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    query = heads("q", HEADS)
    key, value = (heads(name, KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 1) for name in "kv")
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(HEAD_DIM)
    scores += torch.full((len(x), len(x)), -torch.inf).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(len(x), -1) @ (
        layer["self_attn.o_proj.weight"].T
    )


def as_in_vllm(
    layers: list[dict[str, Tensor]], parts: dict[str, Tensor], embeds: Tensor, states: Tensor, *, normed_residual: bool
) -> Tensor:
    """The logits of vLLM's `llama_eagle3.py`, where each norm adds the residual first. embeds, states [tokens, …]"""
    hidden = states @ parts["fc.weight"].T
    residual = hidden
    for number, layer in enumerate(layers):
        if number == 0:
            hidden = rms(hidden, layer["hidden_norm.weight"])
            residual = hidden if normed_residual else residual
            read = torch.cat([rms(embeds, layer["input_layernorm.weight"]), hidden], -1)
        else:
            residual = hidden + residual
            read = rms(residual, layer["input_layernorm.weight"])
        residual = attention(layer, read) + residual
        hidden = rms(residual, layer["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(hidden @ layer["mlp.gate_proj.weight"].T)
        hidden = (gate * (hidden @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return rms(hidden + residual, parts["norm.weight"]) @ parts["lm_head.weight"].T


def named(layers: list[dict[str, Tensor]], *prefixes: str) -> dict[str, Tensor]:
    pairs = zip(prefixes, layers, strict=True)
    return {f"{prefix}{name}": value for prefix, layer in pairs for name, value in layer.items()}


def parts_of_a_head() -> dict[str, Tensor]:
    """All that is not in a layer."""
    return {
        "fc.weight": torch.randn(WIDTH, 3 * WIDTH) * 0.1,
        "norm.weight": torch.rand(WIDTH) + 0.5,
        "lm_head.weight": torch.randn(len(KNOWN), WIDTH),
        "d2t": KNOWN - torch.arange(len(KNOWN)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, KNOWN, True),
    }


IDS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
"""Outputs, because the first is 1."""
LLAMA = {**SHAPE, "model_type": "llama", "draft_vocab_size": len(KNOWN)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EAGLE's own, with the name and the layers of a whole model": {
        "config": {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32},
        "prefixes": ["midlayer."],
    },
    "without architectures": {"config": LLAMA, "prefixes": ["midlayer."]},
    "SpecForge": {
        "config": {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": IDS},
        "prefixes": ["midlayer."],
        "taps": ((2, 4, 5), (1, 3, 4)),
    },
    "AngelSlim, of Qwen, without its norms": {
        "config": {**LLAMA, "model_type": "qwen3", "architectures": ["Eagle3LlamaForCausalLM"], **IDS},
        "prefixes": ["midlayer."],
        "taps": ((2, 4, 5), (1, 3, 4)),
    },
    "a Qwen's norms and biases, which no field states": {
        "config": {**LLAMA, "architectures": ["Qwen3ForCausalLM"]},
        "prefixes": ["model.midlayer."],
        "layer": {"bias": True, "qk_norm": True},
    },
    "ModelOpt, of two layers": {
        "config": {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2, "eagle_config": IDS},
        "prefixes": ["midlayer.0.", "midlayer.1."],
        "taps": ((2, 4, 5), (1, 3, 4)),
    },
    "SGLang, of two layers": {
        "config": {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2},
        "prefixes": ["midlayer.", "additional_layers.0."],
        "renamed": ("additional_layers.0.input_layernorm", "additional_layers.0.hidden_norm"),
    },
    "speculators, of two layers": {
        "config": {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3DraftModel"],
            "transformer_layer_config": {**SHAPE, "num_hidden_layers": 1},
            "draft_vocab_size": len(KNOWN),
            **IDS,
        },
        "prefixes": ["layers.0.", "layers.1."],
        "taps": ((2, 4, 5), (1, 3, 4)),
        "normed_residual": True,
    },
    "speculators, with its target's norm": {
        "config": {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {**SHAPE, "model_type": "llama"},
            "draft_vocab_size": len(KNOWN),
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
        },
        "prefixes": ["layers.0."],
        "normed_residual": True,
        "more": {"verifier_norm.weight": torch.full((WIDTH,), 3.0)},
    },
    "NVIDIA's, up to the last layer, of one norm before the join": {
        "config": {**LLAMA, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 6, 8], "norm_before_fc": True}},
        "prefixes": ["midlayer."],
        "taps": ((4, 6, 8), ()),
        "more": {"input_norm.weight": torch.full((3 * WIDTH,), 0.5)},
    },
    "SpecForge's EAGLE-3.1, with a norm of each state and of what goes on": {
        "config": {**LLAMA, "fc_norm": True, "norm_output": True},
        "prefixes": ["midlayer."],
        "more": {f"fc_norm.{number}.weight": torch.full((WIDTH,), number + 0.5) for number in range(3)},
        "passes_normed": True,
    },
    "of inputs": {
        "config": {**LLAMA, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
        "prefixes": ["midlayer."],
        "taps": ((2, 4, 5), (3, 5, 6)),
    },
    "ModelOpt's, the rows of the commonest tokens first": {
        "config": LLAMA,
        "prefixes": ["midlayer."],
        "more": {"d2t": KNOWN.flip(0) - torch.arange(len(KNOWN))},
    },
    "a list of one layer": {
        "config": {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]},
        "prefixes": ["layers.0."],
    },
    "of a model that takes images": {
        "config": {**LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6], "rope_type": "mrope"}},
        "prefixes": ["midlayer."],
    },
    "heads whose width is not stated": {
        "config": {name: value for name, value in LLAMA.items() if name != "head_dim"},
        "prefixes": ["midlayer."],
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_as_it_is_published_says_what_vllms_code_says(layout: str, tmp_path: Path, target: TargetParts) -> None:
    form = LAYOUTS[layout]
    layers = [layer_of(number, **form.get("layer", {})) for number in range(len(form["prefixes"]))]
    parts = parts_of_a_head()
    tensors = {**parts, **named(layers, *form["prefixes"]), **form.get("more", {})}
    old, new = form.get("renamed", ("", ""))
    tensors = {name.replace(old, new) if old else name: value for name, value in tensors.items()}
    path = written(tmp_path / "head", form["config"], tensors)
    assert is_head(path)
    head = load_head(path, target, torch.float32)
    assert head.kind == "eagle3"
    assert (head.taps, head.other_taps) == form.get("taps", ((2, LAYERS // 2, LAYERS - 3), ()))
    states = torch.randn(1, TOKENS, 3 * WIDTH)
    ids, at_once, stepwise = asked(head, states)
    if (norm := tensors.get("input_norm.weight")) is not None:
        states = torch.nn.functional.rms_norm(states, (3 * WIDTH,), norm, 1e-5)
    if "fc_norm.0.weight" in tensors:
        parts_of = enumerate(states.chunk(3, -1))
        states = torch.cat([rms(part, tensors[f"fc_norm.{number}.weight"]) for number, part in parts_of], -1)
    following, hidden = head.forward(
        ids, head.features(torch.zeros_like(states)), torch.arange(TOKENS)[None], ChainMemory()
    )
    assert torch.equal(following, hidden) is form.get("passes_normed", False)
    normed = form.get("normed_residual", False)
    expected = as_in_vllm(layers, parts, target.embedding[ids[0]], states[0], normed_residual=normed)
    assert head.token_map is not None and bool((head.token_map.diff() > 0).all())
    expected = expected[:, (tensors["d2t"] + torch.arange(len(KNOWN))).argsort()]
    torch.testing.assert_close(at_once[0], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(stepwise[0], expected, rtol=1e-3, atol=1e-3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another activation": ({"hidden_act": "gelu"}, "hidden_act gelu"),
    "a window": ({"layer_types": ["sliding_attention"], "sliding_window": 512}, "layer_types sliding_attention"),
    "the last state alone": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
    "scaled logits": ({"logit_scale": 0.5}, "logit_scale 0.5"),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, "speculators_model_type peagle"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_field_of_a_head_that_computes_something_else_is_refused_by_its_name(
    what: str, tmp_path: Path, target: TargetParts
) -> None:
    fields, message = REFUSED[what]
    tensors = parts_of_a_head() | named([layer_of(0)], "midlayer.")
    with pytest.raises(HeadError, match=rf"config\.json: {message}"):
        load_head(written(tmp_path / "head", {**LLAMA, **fields}, tensors), target)


def test_windows_of_layers_that_the_head_has_not_are_its_targets(tmp_path: Path, target: TargetParts) -> None:
    tensors = parts_of_a_head() | named([layer_of(0)], "midlayer.")
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512}
    assert load_head(written(tmp_path / "head", {**LLAMA, **kinds}, tensors), target).kind == "eagle3"


def test_a_head_of_the_first_eagle_is_refused_by_its_architecture(tmp_path: Path, target: TargetParts) -> None:
    tensors = {"fc.weight": torch.zeros(WIDTH, 2 * WIDTH), "layers.0.self_attn.q_proj.weight": torch.zeros(4, WIDTH)}
    config = {**LLAMA, "model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"]}
    with pytest.raises(HeadError, match=r"not a known draft head.*EagleLlamaForCausalLM.*eagle3, medusa"):
        load_head(written(tmp_path / "head", config, tensors), target)


def test_pickled_weights_are_named_whatever_the_architecture_is_called(tmp_path: Path, target: TargetParts) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(HeadError, match=r"pytorch_model\.bin: pickled weights run code.*convert to safetensors"):
        load_head(tmp_path, target)


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no projection": (
        lambda t: t.pop("midlayer.self_attn.o_proj.weight"),
        r"layers\.0\.self_attn\.o_proj\.weight: missing",
    ),
    "no norm": (lambda t: t.pop("norm.weight"), r"norm\.weight: missing"),
    "two taps": (
        lambda t: t.update({"fc.weight": torch.zeros(WIDTH, 2 * WIDTH)}),
        r"fc\.weight: has the shape \[64, 128\].*\[64, 192\]",
    ),
    "d2t off by one": (lambda t: t["d2t"].add_(1), "d2t: names other tokens than t2d"),
    "d2t with one token twice": (lambda t: t["d2t"][1].sub_(3), "d2t: names a token twice"),
    "d2t outside": (lambda t: t["d2t"].add_(VOCAB), "d2t: names tokens outside"),
    "not a number": (lambda t: t["fc.weight"][3].fill_(torch.nan), r"fc\.weight: has values that are no numbers"),
    "quantized": (
        lambda t: t.update(
            {
                "midlayer.mlp.up_proj.weight": torch.zeros(INNER, WIDTH, dtype=torch.float8_e4m3fn),
                "midlayer.mlp.up_proj.weight_scale": torch.ones(INNER, 1),
            }
        ),
        r"up_proj\.weight_scale: quantized weights",
    ),
    "in 8 bits without scales": (
        lambda t: t.update({"norm.weight": torch.ones(WIDTH).to(torch.float8_e4m3fn)}),
        r"norm\.weight: is of torch\.float8_e4m3fn",
    ),
    "P-EAGLE's": (lambda t: t.update({"mask_hidden": torch.zeros(1, 1, 3 * WIDTH)}), "mask_hidden: parallel drafting"),
    "experts": (
        lambda t: t.update({"midlayer.mlp.experts.0.up_proj.weight": torch.zeros(2)}),
        "experts are not served",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(tmp_path: Path, target: TargetParts, damage: str) -> None:
    tensors = parts_of_a_head() | named([layer_of(0)], "midlayer.")
    spoil, message = DAMAGE[damage]
    spoil(tensors)
    with pytest.raises(HeadError, match=message):
        load_head(written(tmp_path / "head", LLAMA, tensors), target)


def test_frequencies_stay_exact_in_a_head_of_bfloat16(tmp_path: Path, target: TargetParts) -> None:
    tensors = parts_of_a_head() | named([layer_of(0)], "midlayer.")
    path = written(tmp_path / "head", LLAMA, tensors)
    far = torch.arange(10_000, 10_100)[None]
    exact, rounded = (load_head(path, target, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert isinstance(exact, Eagle3Head) and isinstance(rounded, Eagle3Head)
    assert all(map(torch.equal, exact.rotary(far), rounded.rotary(far)))


PROMPT = [5, 17, 40, 61]


def by_heart(path: Path, ids: list[int], text: list[int], states: Tensor) -> Path:
    """A head that says a text by heart, from these states of the layers that it reads. ids: what it calls these."""
    rows = torch.randn(384, 64, generator=torch.Generator().manual_seed(1))
    wanted = rows[torch.tensor(text[2:])]
    fc = torch.linalg.lstsq(states[: len(wanted)].double(), wanted.double(), driver="gelsd").solution.T.float()
    shape = {**SHAPE, "vocab_size": 384, "hidden_size": 64, "model_type": "llama"}
    tensors = named([{name: torch.zeros_like(value) for name, value in layer_of(0).items()}], "midlayer.")
    tensors |= {"fc.weight": fc, "norm.weight": torch.ones(64), "lm_head.weight": rows}
    return written(path, {**shape, "eagle_aux_hidden_state_layer_ids": ids}, tensors)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("shift", [0, 1])
def test_of_inputs_and_outputs_those_are_read_from_which_the_head_guesses_more(
    first: int, shift: int, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, 384, (50,), generator=generator)
    states = {layer: torch.randn(49, 64, generator=generator) for layer in range(1, 6)}
    ids = [first, first + 1, first + 2]
    read = tuple(tap + shift for tap in ids)
    head = by_heart(tmp_path / "head", ids, text.tolist(), torch.cat([states[tap] for tap in read], -1))
    loaded = load_head(head, TargetParts(torch.randn(384, 64), torch.randn(384, 64), 6), torch.float32)
    assert loaded.taps[0] == 2, "as SGLang tells them apart"
    choose_taps(loaded, text[:49], states)
    assert loaded.taps == read


@pytest.mark.parametrize("shift", [0, 1])
def test_taps_are_inputs_or_outputs_of_layers_whichever_the_text_of_the_target_says(
    shift: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("llama", {"num_hidden_layers": 6, "vocab_size": 384, "eos_token_id": 383}, tmp_path / "model")
    engine = load_engine(model, EngineConfig(dtype="float32", num_blocks=32))
    first = 2 - shift
    text, found, pending = list(PROMPT), [], list(PROMPT)
    sequence = engine.kv.open([])
    for _ in range(48):
        logits, states = engine.forward_tapped([Row(sequence, pending, 1, num_tapped=len(pending))], (2, 3, 4))
        found.append(states.clone())
        pending = [int(logits[-1].argmax())]
        text += pending
    engine.kv.close(sequence)
    states = torch.cat(found)
    head = by_heart(tmp_path / "head", [first, first + 1, first + 2], text, states)
    with caplog.at_level(logging.INFO):
        loaded = tried_head(engine, model, head, PROMPT)
    assert isinstance(loaded, Eagle3Head) and loaded.taps == (2, 3, 4)
    assert f"reads the {('inputs', 'outputs')[shift]} of layers {first}, {first + 1}, {first + 2}" in caplog.text
    assert agreement(loaded, torch.tensor(text[:-1]), states) > 0.8
