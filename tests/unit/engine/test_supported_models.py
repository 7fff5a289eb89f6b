"""Which shapes of decoders are served: each, with random weights, answers as transformers does alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.engine import CheckpointError, EngineConfig
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.architectures import architecture_problem
from outrider.local import Speculator
from outrider.testing.tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma3_text": {"sliding_window": 64, "query_pre_attn_scalar": 16},
    "phi3": {"partial_rotary_factor": 1.0},
    "olmo2": {},
    "smollm3": {},
    "granite": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
}
EXPERTS = [kind for kind in MODELS if "experts" in str(MODELS[kind])]
PROMPTS = [list(range(10, 19)), [5], [40, 41] * 9]
STEPS = 24


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return made(request.param, MODELS[request.param], tmp_path)


def made(kind: str, settings: dict[str, Any], directory: Path) -> Path:
    config = AutoConfig.for_model(kind, **{**COMMON, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Loud, so that no two tokens are nearly as likely.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def greedy(model: Any, prompt: list[int], text: list[int]) -> list[int]:
    """The most likely token in the place of each token of a text: the text itself, where it is the greedy one."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + text])).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens


def test_a_target_of_it_says_what_transformers_says_with_drafts_too(checkpoint: Path) -> None:
    speculator = Speculator(checkpoint, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for completion, prompt in zip(speculator.generate(PROMPTS, max_new_tokens=STEPS), PROMPTS, strict=True):
        assert completion.token_ids == greedy(model, prompt, completion.token_ids)
        assert len(completion.token_ids) == STEPS or completion.token_ids[-1] == model.config.eos_token_id


def test_heads_wider_than_gpus_take_are_refused_by_name_there_and_run_on_cpus(tmp_path: Path) -> None:
    path = made("qwen3", {"head_dim": 320}, tmp_path)
    with pytest.raises(CheckpointError, match="head_dim: 320"):
        load_engine(path, EngineConfig(dtype="float32", attention="triton"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    [found] = Speculator(path, dtype="float32").generate(PROMPTS[:1], max_new_tokens=STEPS)
    assert found.token_ids == greedy(model, PROMPTS[0], found.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forty_texts_of_a_mixture_of_experts_are_the_same_with_and_without_drafts(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 250) for _ in range(rng.choice([1, 9, 40]))] * 2 for _ in range(40)]
    path = made(kind, MODELS[kind], tmp_path)
    speculator = Speculator(path, path, dtype=dtype)
    plain, drafted = (speculator.generate(prompts, max_new_tokens=STEPS, speculate=on) for on in (False, True))
    assert [found.token_ids for found in drafted] == [found.token_ids for found in plain]
    assert sum(found.num_accepted for found in drafted) > 0
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        texts = [found.token_ids for found in plain]
        assert texts == [greedy(model, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]


def test_a_window_in_other_layers_than_the_config_states_is_refused_as_it_is_loaded(tmp_path: Path) -> None:
    """transformers' code for it gives the window to all layers."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    settings = {"use_sliding_window": True, "sliding_window": 9, "layer_types": kinds}
    reason = "window of 9 positions in layer 0, where its config states None.*use --engine vllm"
    with pytest.raises(CheckpointError, match=reason):
        load_engine(made("qwen3_moe", MODELS["qwen3_moe"] | settings, tmp_path), EngineConfig(dtype="float32"))


def test_the_page_of_models_lists_what_is_tested_here() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    for kind in [*MODELS, "gemma2"]:
        assert f"`{kind}`" in page


def test_a_window_that_transformers_does_not_use_is_refused() -> None:
    config = AutoConfig.for_model("moshi")
    assert "sliding_window" in str(architecture_problem(config))
    assert architecture_problem(AutoConfig.for_model("mistral")) is None
