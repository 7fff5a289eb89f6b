"""Texts of vLLM's second runner with drafts from outside are those of vLLM alone, and without drafts it runs the same.

A quick part of `python -m tests.vllm.second_runner`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import chisquare

from tests.vllm.second_runner import RECORDED, Drafts, Plan, answers, compare, engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PLANS: dict[str, dict[str, Any]] = {
    "synchronous": {"groups": 2, "most_requests": 4},
    "asynchronous": {"groups": 2, "most_requests": 4, "asynchronous": True, "seed": 1},
    "bfloat16": {"groups": 1, "most_requests": 4, "dtype": "bfloat16", "seed": 3},
    "drafter": {"groups": 2, "most_requests": 4, "kinds": ("own",), "speculative": {"method": "draft_model"}},
    "drafter, asynchronous": {
        "groups": 2,
        "most_requests": 4,
        "asynchronous": True,
        "kinds": ("own", "some"),
        "speculative": {"method": "draft_model"},
    },
    "EAGLE-3": {"groups": 2, "most_requests": 4, "kinds": ("own", "some"), "speculative": {"method": "eagle3"}},
    "adapters": {"groups": 1, "most_requests": 4, "asynchronous": True, "kinds": ("right",)},
    "preempted": {"groups": 1, "small": True, "kinds": ("right", "some")},
    "FP8 KV": {"groups": 1, "most_requests": 4, "dtype": "bfloat16", "more": {"kv_cache_dtype": "fp8"}},
}


def lora_adapter(directory: Path) -> Path:
    """Of the tiny model's attention, with random weights that change its texts."""
    torch.manual_seed(1)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": 0.3 * torch.randn(*shape)
        for layer in range(2)
        for name, size in (("q_proj", 128), ("v_proj", 64))
        for part, shape in (("A", (8, 64)), ("B", (size, 8)))
    }
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    return directory


def eagle3_head(directory: Path, model: Path) -> Path:
    """Of the tiny model, with random weights, in the form of published heads."""
    torch.manual_seed(2)
    config = json.loads((model / "config.json").read_text())
    size, inner, attended = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * attended, config["num_key_value_heads"] * attended
    shapes = {
        "fc": (size, 2 * size),
        "midlayer.self_attn.q_proj": (queries, 2 * size),
        "midlayer.self_attn.k_proj": (keys, 2 * size),
        "midlayer.self_attn.v_proj": (keys, 2 * size),
        "midlayer.self_attn.o_proj": (size, queries),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
        "lm_head": (config["vocab_size"], size),
    }
    weights = {f"{name}.weight": 0.2 * torch.randn(*shape) for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(size) for name in norms}
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    head |= {"draft_vocab_size": config["vocab_size"], "eagle_aux_hidden_state_layer_ids": [0, 1]}
    head |= {"num_aux_hidden_states": 2}
    (directory / "config.json").write_text(json.dumps(config | head))
    return directory


@pytest.mark.parametrize("name", PLANS)
def test_texts_with_drafts_are_those_of_vllm_alone(tiny_vllm: Path, tmp_path: Path, name: str) -> None:
    plan = Plan(str(tiny_vllm), **PLANS[name])
    if name == "adapters":
        plan = replace(plan, adapter=str(lora_adapter(tmp_path / "adapter")))
    if own := "own" in plan.kinds:
        drafter = plan.model if name != "EAGLE-3" else str(eagle3_head(tmp_path / "head", tiny_vllm))
        plan = replace(plan, speculative={**plan.speculative, "model": drafter})
    result = compare(plan)
    assert not [said for _, _, wrong, *_ in result["found"] for said in wrong]
    drafted, accepted = Counter[str](), Counter[str]()
    for kind, _, _, proposed, count, most in result["found"]:
        drafted[kind] += proposed
        accepted[kind] += count
        if kind == "own":
            assert all(found <= int(cap) for cap, found in most.items())
    # Of random weights' drafts hardly one is right.
    counted = drafted if name == "EAGLE-3" else accepted
    assert counted["own" if own else "right"] > 10 and not accepted["none"]
    assert not result["faults"] and not result["miscounted"] and bool(result["preemptions"]) == (name == "preempted")
    # What runs without drafts, kernel by kernel; a drafter runs then too.
    assert result["ran"] > 100 and (own or result["differs"] == [[], []])


DRAWS, BATCH, VOCABULARY = 2_000, 200, 48


def drawn(logits: torch.Tensor, drafted: int) -> list[list[int]]:
    """Of a batch of requests without a seed, each with this drafted token: the tokens that are committed."""
    from outrider.vllm.worker import DrawSampler
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    # As vLLM draws them for requests without one.
    seeds = torch.from_numpy(np.random.randint(np.iinfo(np.int64).min, np.iinfo(np.int64).max, BATCH))
    temperature = torch.ones(BATCH)

    def sample(
        rows: torch.Tensor, mapping: torch.Tensor, one: Any, two: Any, positions: Any, *rest: Any, **more: Any
    ) -> Any:
        noise = {"apply_temperature": False, "is_drafting": False, "use_fp64": False}
        return gumbel_sample(rows, mapping, temperature, seeds, positions, **noise), rows

    sampler = object.__new__(DrawSampler)
    sampler.num_speculative_steps = 1
    sampler.sampler = SimpleNamespace(sample=sample, get_logprobs_dims=lambda *args, **more: None)
    inputs = torch.tensor([5, drafted] * BATCH, dtype=torch.int32)
    mapping = torch.arange(BATCH).repeat_interleave(2)
    starts = torch.arange(0, 2 * BATCH + 1, 2, dtype=torch.int32)
    rest = torch.arange(BATCH), np.arange(BATCH), mapping, torch.tensor([0, 1] * BATCH), None, inputs
    positions = torch.tensor([7, 8] * BATCH)
    _, sampled, counts = sampler._verify(logits.repeat(BATCH, 1), None, inputs, positions, starts, *rest)
    return [row[:count] for row, count in zip(sampled.tolist(), counts.tolist(), strict=True)]


def p_value(tokens: list[int], logits: torch.Tensor) -> float:
    due = logits.double().softmax(-1) * len(tokens)
    counts = Counter(tokens)
    likely = [token for token in range(VOCABULARY) if due[token] >= 5]
    seen, expected = [counts[token] for token in likely], [float(due[token]) for token in likely]
    return float(chisquare([*seen, len(tokens) - sum(seen)], [*expected, len(tokens) - sum(expected)]).pvalue)


def test_unseeded_texts_are_drawn_as_vllm_draws() -> None:
    torch.manual_seed(3)
    logits = 2 * torch.randn(2, VOCABULARY)
    drafted = int(logits[0].topk(2).indices[1])
    found = [tokens for _ in range(DRAWS // BATCH) for tokens in drawn(logits, drafted)]
    second = [tokens[1] for tokens in found if len(tokens) > 1]
    assert all(len(tokens) == 1 + (tokens[0] == drafted) for tokens in found) and len(second) > 100
    assert p_value([tokens[0] for tokens in found], logits[0]) > 1e-4 and p_value(second, logits[1]) > 1e-4
    # The control: the check finds another distribution.
    assert p_value([tokens[0] for tokens in found], logits[1]) < 1e-4


def test_what_steps_with_drafts_launch_has_been_compiled_at_the_start(
    tiny_vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own warm-up, which it does on GPUs."""
    from outrider.vllm import worker as ours
    from triton.runtime import interpreter
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    launched, launch = set[str](), interpreter.GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(self.fn.__name__)
        return launch(self, *args, **kwargs)

    warm_up = ours.BaseWorker.compile_or_warm_up_model

    def warm_up_as_on_gpus(self: Any) -> Any:
        warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        return warm_up(self)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    monkeypatch.setattr(ours.BaseWorker, "compile_or_warm_up_model", warm_up_as_on_gpus)
    with engine(Plan(str(tiny_vllm)), drafts=True) as llm:
        compiled = {*launched}
        source = Drafts(llm.llm_engine.engine_core.engine_core.scheduler, 384)
        for kind in ("none", "right"):
            launched.clear()
            source.begin([{"ids": [[7] * 6]}] * len(RECORDED), kind)
            answers(llm, RECORDED)
        assert source.num_drafted and {"accept_kernel", "follow_kernel"} <= launched <= compiled
