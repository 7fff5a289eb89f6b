"""Every setting of a GGUF file has its effect, or the file is refused by the setting's name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import CheckpointError, EngineConfig, Row, resolve
from outrider.engine.checkpoints.gguf_settings import FAMILIES as READ
from outrider.engine.loading.loader import load_engine

from tests.unit.engine.gguf_files import (
    CONTEXT,
    FAMILIES,
    KV_HEADS,
    WIDTH,
    Setting,
    architecture,
    llama3_factors,
    reference,
    write,
)

TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(60)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = llama3_factors(WIDTH, 10000.0, LLAMA3)
SHORT, LONG = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0], [2.0, 3.0, 5.0, 8.0, 12.0, 16.0, 24.0, 32.0]
LONGROPE = Setting(
    keys={
        "rope.scaling.type": "longrope",
        "rope.scaling.attn_factor": 1.19,
        "rope.scaling.original_context_length": 64,
    },
    tensors={"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT},
    rope={
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.19,
        "original_max_position_embeddings": 64,
    },
    config={"original_max_position_embeddings": 64},
)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROTARY = {
    "plain": Setting(),
    "base": Setting(keys={"rope.freq_base": 500.0}, rope={"rope_theta": 500.0}),
    "linear": Setting(
        keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, rope={"rope_type": "linear", "factor": 4.0}
    ),
    "factor alone": Setting(keys={"rope.scaling.factor": 4.0}, rope={"rope_type": "linear", "factor": 4.0}),
    "old name": Setting(keys={"rope.scale_linear": 4.0}, rope={"rope_type": "linear", "factor": 4.0}),
    "yarn": Setting(keys=YARN, rope=YARN_ROPE),
    "yarn by its parts": Setting(
        keys=YARN
        | {
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_attn_factor": 1.5,
            "rope.scaling.yarn_ext_factor": 1.0,
        },
        rope=YARN_ROPE | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5},
    ),
    "llama3": Setting(tensors={"rope_freqs.weight": FACTORS}, rope={"rope_type": "llama3", **LLAMA3}),
    "longrope": LONGROPE,
}
OTHERS = [
    ("phi3", "half of a head", Setting(keys={"rope.dimension_count": WIDTH // 2}, rope={"partial_rotary_factor": 0.5})),
    ("phi3", "window", Setting(keys={"attention.sliding_window": 9}, config={"sliding_window": 9})),
    (
        "phi3",
        "half of a head with long factors",
        Setting(
            keys=LONGROPE.keys | {"rope.dimension_count": WIDTH // 2},
            tensors={name: factors[:4] for name, factors in LONGROPE.tensors.items()},
            config=LONGROPE.config,
            rope=LONGROPE.rope | {"short_factor": SHORT[:4], "long_factor": LONG[:4], "partial_rotary_factor": 0.5},
        ),
    ),
    ("mixtral", "window", Setting(keys={"attention.sliding_window": 9}, config={"sliding_window": 9})),
    (
        "granite",
        "multipliers",
        Setting(
            keys={"residual_scale": 0.5, "embedding_scale": 3.0, "attention.scale": 0.4},
            config={"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.4},
        ),
    ),
    ("granite", "no scale", Setting(keys={"logit_scale": 0.0}, config={"logits_scaling": 1.0})),
    ("llama", "biases", Setting(config={"attention_bias": True, "mlp_bias": True})),
    ("llama", "tied", Setting(config={"tie_word_embeddings": True})),
    (
        "gemma3",
        "base of windows",
        Setting(
            keys={"rope.freq_base_swa": 100.0},
            config={
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                }
            },
        ),
    ),
    (
        "gemma3",
        "windows by layers",
        Setting(
            keys={"attention.sliding_window_pattern": [False, True], "attention.sliding_window": 9},
            config={"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
        ),
    ),
    (
        "gemma3",
        "capped logits",
        Setting(keys={"final_logit_softcapping": 2.0}, config={"final_logit_softcapping": 2.0}),
    ),
    ("qwen3moe", "weights not normed", Setting(keys={"expert_weights_norm": False}, config={"norm_topk_prob": False})),
    ("qwen2moe", "weights normed", Setting(keys={"expert_weights_norm": True}, config={"norm_topk_prob": True})),
]
NOT_TAKEN = {
    "gemma3": {"yarn", "yarn by its parts", "llama3", "longrope"},
    # Of whose config transformers takes no other than long factors.
    "phi3": {"linear", "factor alone", "old name", "yarn", "yarn by its parts"},
}
QUICK = {("llama", "llama3"), ("qwen2", "yarn by its parts"), ("phi3", "longrope"), ("gemma3", "linear")}
CASES = [(family, name, setting) for family in FAMILIES for name, setting in ROTARY.items()] + OTHERS
# transformers' Phi 3 knows it as long factors alone.
AS_FACTORS = {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS, "attention_factor": 1.0}
AS_FACTORS |= {"original_max_position_embeddings": CONTEXT}
CASES = [
    (
        family,
        name,
        Setting(rope=AS_FACTORS, config={"original_max_position_embeddings": CONTEXT}, tensors=setting.tensors),
    )
    if (family, name) == ("phi3", "llama3")
    else (family, name, setting)
    for family, name, setting in CASES
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


@pytest.mark.parametrize(
    ("family", "name", "setting"),
    [
        pytest.param(*case, id="-".join(case[:2]), marks=() if case[:2] in QUICK else pytest.mark.slow)
        for case in CASES
        if case[1] not in NOT_TAKEN.get(case[0], ())
    ],
)
def test_a_file_says_what_transformers_says_with_its_settings(
    family: str, name: str, setting: Setting, tmp_path: Path
) -> None:
    model = reference(family, setting)
    file = write(tmp_path / "some.gguf", family, setting, model)
    engine = load_engine(resolve(file), EngineConfig(dtype="float32", num_blocks=8))
    found, wanted = engine.forward([Row(engine.kv.open(TOKENS), TOKENS, len(TOKENS))]), logits(model)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    if name != "plain" and name != "biases" and name != "tied":
        # Otherwise this would pass without the setting.
        without = reference(family, Setting())
        without.load_state_dict(model.state_dict())
        assert float((logits(without) - wanted).norm() / wanted.norm()) > 1e-2


REFUSED = [
    *(
        (family, ROTARY[name], rf"{family}\.rope\.scaling\.type: ")
        for family in NOT_TAKEN
        for name in sorted(NOT_TAKEN[family])
    ),
    ("qwen2", Setting(keys={"rope.dimension_count": 8}), r"qwen2\.rope\.dimension_count: 8"),
    ("llama", Setting(keys={"rope.freq_base_swa": 100.0}), r"llama\.rope\.freq_base_swa"),
    ("qwen3", Setting(keys={"attention.sliding_window": 9}), r"qwen3\.attention\.sliding_window"),
    ("olmo2", Setting(keys={"attention.sliding_window": 9}), r"olmo2\.attention\.sliding_window"),
    ("llama", Setting(keys={"attention.scale": 0.5}), r"llama\.attention\.scale"),
    ("llama", Setting(keys={"logit_scale": 0.5}), r"llama\.logit_scale"),
    ("granite", Setting(keys={"rope.scaling.finetuned": False}), r"rope\.scaling\.finetuned: False"),
    ("llama", Setting(keys={"rope.scaling.type": "ntk"}), r"rope\.scaling\.type: ntk"),
    ("llama", Setting(keys={"rope.scaling.type": "none", "rope.scaling.factor": 2.0}), r"rope\.scaling\.factor"),
    ("llama", Setting(keys={"rope.scaling.alpha": 1000.0}), r"rope\.scaling\.alpha"),
    ("llama", Setting(keys=YARN | {"rope.scaling.yarn_ext_factor": 0.5}), "yarn_ext_factor: 0.5"),
    ("llama", Setting(keys=YARN | {"rope.scaling.yarn_log_multiplier": 0.1}), "yarn_log_multiplier"),
    ("llama", Setting(keys={"rope.scaling.yarn_beta_fast": 16.0}), "yarn_beta_fast"),
    ("llama", Setting(keys={"rope.scaling.attn_factor": 1.2}), r"rope\.scaling\.attn_factor"),
    ("llama", Setting(keys={"rope.scaling.type": "longrope"}), "rope_factors_long.weight"),
    ("phi3", Setting(tensors={"rope_factors_long.weight": LONG}), "rope_factors_short.weight"),
    ("llama", Setting(tensors={"rope_freqs.weight": [2.0] * 3}), "rope_freqs.weight: 3 factors"),
    ("llama", Setting(tensors={"blk.0.attn_sinks.weight": [1.0] * 4}), "that are not read: blk.0.attn_sinks.weight"),
    ("llama", Setting(keys={"attention.head_count_kv": [KV_HEADS, 4]}), "head_count_kv: its layers differ"),
    ("llama", Setting(keys={"attention.layer_norm_rms_epsilon": math.nan}), "layer_norm_rms_epsilon: nan is no number"),
    ("granite", Setting(keys={"attention.scale": math.inf}), r"granite\.attention\.scale: inf is no number"),
    ("llama", Setting(keys={"attention.causal": False}), r"attention\.causal: False"),
    ("llama", Setting(keys={"attention.value_length": 8}), r"attention\.value_length: 8"),
    ("gemma3", Setting(keys={"attn_logit_softcapping": 30.0}), "attn_logit_softcapping: 30.0"),
    ("qwen3moe", Setting(keys={"expert_gating_func": 2}), "expert_gating_func: 2"),
    ("mixtral", Setting(keys={"expert_weights_scale": 2.5}), "expert_weights_scale: 2.5"),
    ("llama", Setting(keys={"never_heard_of": 1}), "llama.never_heard_of: not read here"),
    ("llama", Setting(keys={".somebody.key": 1}), "somebody.key: not read here"),
    ("llama", Setting(keys={".general.type": "adapter"}), "general.type: adapter"),
    ("llama", Setting(keys={".split.count": 3}), "split.count: one of 3 files"),
    ("llama", Setting(keys={".tokenizer.ggml.add_sep_token": True}), "add_sep_token: True"),
    ("llama", Setting(keys={".tokenizer.ggml.normalizer.lowercase": True}), "normalizer.lowercase"),
]


@pytest.mark.parametrize(
    ("family", "setting", "named"), REFUSED, ids=[f"{n}-{case[2]}" for n, case in enumerate(REFUSED)]
)
def test_a_setting_that_has_no_effect_is_refused_by_name(
    family: str, setting: Setting, named: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "some.gguf", family, setting, reference(family, Setting()))
    with pytest.raises(CheckpointError, match=named):
        resolve(file)
    assert not list((tmp_path / "cache" / "converted").rglob("config.json"))


@pytest.mark.parametrize("arch", ["gemma2", "starcoder2", "olmoe", "llama4"])
def test_an_architecture_that_is_not_read_is_refused_by_name(arch: str, tmp_path: Path) -> None:
    file = write(tmp_path / "some.gguf", "llama", Setting())
    content = file.read_bytes()
    # As long as `llama`, or with that many bytes more.
    head, tail = content.split(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", 1)
    assert b"general.architecture" in head
    file.write_bytes(head + len(arch).to_bytes(8, "little") + arch.encode() + tail)
    with pytest.raises(CheckpointError, match=f"general.architecture: '{arch}' is none of gemma, "):
        resolve(file)


def test_the_page_of_models_lists_the_architectures() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    assert {architecture(family) for family in FAMILIES} == set(READ)
    assert all(f"`{name}`" in page for name in READ)


def test_what_the_file_says_of_sampling_is_kept(tmp_path: Path) -> None:
    keys = {".general.sampling.temp": 0.6, ".general.sampling.top_k": 20, ".general.sampling.mirostat": 0}
    made = resolve(write(tmp_path / "some.gguf", "llama", Setting(keys=keys)))
    stated = json.loads((made / "generation_config.json").read_text())
    assert (round(stated["temperature"], 3), stated["top_k"], stated["do_sample"]) == (0.6, 20, True)


def test_the_context_of_long_factors_ends_where_they_change(tmp_path: Path) -> None:
    path = resolve(write(tmp_path / "some.gguf", "phi3", LONGROPE))
    assert load_engine(path, EngineConfig(dtype="float32", num_blocks=32)).info.max_context_len == CONTEXT // 2
