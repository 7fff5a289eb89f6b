"""Heads in the field's formats say what transformers' own layers say with the same tensors; others are refused."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.heads import HeadError, TargetParts, load_head
from outrider.heads.check import self_check
from outrider.heads.interface import ChainMemory, DraftHead
from outrider.heads.loading import is_head
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

WIDTH, VOCAB, TOKENS, LAYERS = 64, 96, 9, 8
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def target() -> TargetParts:
    return TargetParts(torch.randn(VOCAB, WIDTH), torch.randn(VOCAB, WIDTH), LAYERS)


def scrambled(module: torch.nn.Module) -> torch.nn.Module:
    for value in module.parameters():
        torch.nn.init.normal_(value, std=0.3)
    return module.eval().requires_grad_(False)


def written(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    return path


def asked(head: DraftHead, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, what the head says of them in one go, and the same a token at a time."""
    ids, positions = torch.randint(0, VOCAB, (1, TOKENS)), torch.arange(TOKENS)[None]
    features = head.features(states)
    at_once = head.logits(head.forward(ids, features, positions, ChainMemory())[1])
    memory = ChainMemory()
    steps = [
        head.forward(ids[:, t : t + 1], features[:, t : t + 1], positions[:, t : t + 1], memory)[1]
        for t in range(TOKENS)
    ]
    return ids, at_once, head.logits(torch.cat(steps, 1))


def decoder(kind: str) -> tuple[Any, Any, Any, type[torch.nn.Module]]:
    """A transformers layer with its config, rotary table and norm."""
    if kind == "llama":
        config: Any = LlamaConfig(**SHAPE)
        return config, LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config), LlamaRMSNorm
    if kind == "qwen3":
        config = Qwen3Config(**SHAPE)
        return config, Qwen3DecoderLayer(config, 0), Qwen3RotaryEmbedding(config), LlamaRMSNorm
    config = Qwen3NextConfig(**SHAPE, layer_types=["full_attention"], mlp_only_layers=[0], partial_rotary_factor=0.25)
    return config, Qwen3NextDecoderLayer(config, 0), Qwen3NextRotaryEmbedding(config), Qwen3NextRMSNorm


def through(layer: Any, rotary: Any, config: Any, x: Tensor) -> Tensor:
    config._attn_implementation = "eager"
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    positions = torch.arange(TOKENS)[None]
    out = layer(x, position_embeddings=rotary(x, positions), attention_mask=mask, position_ids=positions)
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", "deepseek"),
        ("qwen3", "qwen"),
        ("qwen3", "qwen, in mtp.safetensors"),
        ("qwen3_next", "qwen"),
        ("qwen3_next", "qwen, of a model that takes images"),
    ],
)
def test_a_layer_of_multi_token_prediction_says_what_transformers_layers_say(
    tmp_path: Path, target: TargetParts, kind: str, names: str
) -> None:
    config, layer, rotary, norm = decoder(kind)
    layer = scrambled(layer)
    norms = [scrambled(norm(WIDTH, eps=1e-5)) for _ in range(3)]
    join = torch.randn(WIDTH, 2 * WIDTH) * 0.1
    block = layer.state_dict()
    if names == "deepseek":
        prefix, shared, projection = "model.layers.1.", "shared_head.norm", "eh_proj"
        tensors = {f"model.layers.1.{name}": value for name, value in block.items()}
        first, second = "enorm", "hnorm"
        extra = {"num_nextn_predict_layers": 1, "architectures": ["DeepseekV3ForCausalLM"]}
    else:
        prefix, shared, projection = "mtp.", "norm", "fc"
        tensors = {f"mtp.layers.0.{name}": value for name, value in block.items()}
        first, second = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
        extra = {"mtp_num_hidden_layers": 1, "partial_rotary_factor": 0.25 if kind == "qwen3_next" else 1.0}
    tensors |= {f"{prefix}{projection}.weight": join, f"{prefix}{shared}.weight": norms[2].state_dict()["weight"]}
    tensors |= {f"{prefix}{n}.weight": m.state_dict()["weight"] for n, m in zip((first, second), norms, strict=False)}
    # What else a whole model has is not the head's.
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3)
    settings: dict[str, Any] = {**SHAPE, **extra, "model_type": kind}
    if names.endswith("images"):
        settings = {"model_type": "qwen3_5", "text_config": {**settings, "model_type": "qwen3_5_text"}}
    path = written(tmp_path / "model", settings, tensors)
    if names.endswith("mtp.safetensors"):
        (path / "model.safetensors").rename(path / "mtp.safetensors")
        save_file({"model.norm.weight": torch.zeros(WIDTH)}, path / "model.safetensors")
    head = load_head(path, target, torch.float32)
    states = torch.randn(1, TOKENS, WIDTH)
    ids, at_once, stepwise = asked(head, states)
    x = torch.cat([norms[0](target.embedding[ids]), norms[1](states)], -1) @ join.T
    normed = norms[2](through(layer, rotary, config, x))
    expected = normed @ target.head.T
    torch.testing.assert_close(at_once, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(stepwise, expected, rtol=1e-3, atol=1e-3)
    # In vLLM, both of DeepSeek's form and of Qwen's, the next drafted token reads the state after the last norm.
    passed, _ = head.forward(ids, head.features(states), torch.arange(TOKENS)[None], ChainMemory())
    torch.testing.assert_close(passed, normed, rtol=1e-3, atol=1e-3)


KNOWN = torch.tensor([*range(0, VOCAB, 3)])


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (WIDTH,), weight, 1e-5)


def ours(taps: list[int]) -> tuple[dict[str, Any], dict[str, Tensor], list[Any]]:
    """An MTP head of two layers in our format, which joins states of the target before the second one."""
    layers = [scrambled(LlamaDecoderLayer(LlamaConfig(**SHAPE), number)) for number in range(2)]
    tensors = {
        f"layers.{n}.{name}": value for n, layer in enumerate(layers) for name, value in layer.state_dict().items()
    }
    tensors |= {"fc.weight": torch.randn(WIDTH, 2 * WIDTH) * 0.1, "eh_proj.weight": torch.randn(WIDTH, 2 * WIDTH) * 0.1}
    tensors |= {f"{name}.weight": torch.randn(WIDTH) for name in ("fc_norm.0", "fc_norm.1", "hnorm", "norm")}
    about = {"format": 1, "kind": "mtp", "early": 1, "taps": taps}
    return {**SHAPE, "model_type": "llama", "num_hidden_layers": 2, "outrider_head": about}, tensors, layers


def test_an_mtp_head_that_reads_layers_of_the_target_says_what_transformers_layers_say(
    tmp_path: Path, target: TargetParts
) -> None:
    config, tensors, layers = ours([3, 6])
    head = load_head(written(tmp_path / "head", config, tensors), target, torch.float32)
    assert head.taps == (3, 6)
    states = torch.randn(1, TOKENS, 2 * WIDTH)
    ids, at_once, stepwise = asked(head, states)
    parts = [rms(states[..., n * WIDTH :][..., :WIDTH], tensors[f"fc_norm.{n}.weight"]) for n in range(2)]
    feature = rms(torch.cat(parts, -1) @ tensors["fc.weight"].T, tensors["hnorm.weight"])
    llama, rotary = LlamaConfig(**SHAPE), LlamaRotaryEmbedding(LlamaConfig(**SHAPE))
    x = torch.cat([through(layers[0], rotary, llama, target.embedding[ids]), feature], -1) @ tensors["eh_proj.weight"].T
    expected = rms(through(layers[1], rotary, llama, x), tensors["norm.weight"]) @ target.head.T
    torch.testing.assert_close(at_once, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(stepwise, expected, rtol=1e-3, atol=1e-3)


def test_a_head_that_reads_layers_that_its_target_lacks_is_refused(tmp_path: Path, target: TargetParts) -> None:
    config, tensors, _ = ours([3, LAYERS + 1])
    with pytest.raises(HeadError, match=r"outrider_head.taps \(3, 9\): the target has 8 layers"):
        load_head(written(tmp_path / "head", config, tensors), target)


@pytest.mark.parametrize("form", ["blocks", "numbers"])
def test_medusa_heads_are_residual_blocks_on_the_last_state(tmp_path: Path, target: TargetParts, form: str) -> None:
    weights = [(torch.randn(WIDTH, WIDTH) * 0.1, torch.randn(WIDTH)) for _ in range(3)]
    heads = [torch.randn(VOCAB, WIDTH) for _ in range(3)]
    tensors: dict[str, Tensor] = {}
    for number, ((weight, bias), head) in enumerate(zip(weights, heads, strict=True)):
        block = f"blocks.{number}.layers.0" if form == "blocks" else f"{number}.0.linear"
        last = f"lm_heads.{number}" if form == "blocks" else f"{number}.1"
        tensors |= {f"{block}.weight": weight, f"{block}.bias": bias, f"{last}.weight": head}
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    loaded = load_head(written(tmp_path / "head", config, tensors), target, torch.float32)
    states = torch.randn(1, TOKENS, WIDTH)
    _, found, _ = asked(loaded, states)
    assert loaded.lookahead == 3 and not loaded.recurrent
    for number, (weight, bias) in enumerate(weights):
        expected = (states + torch.nn.functional.silu(states @ weight.T + bias)) @ heads[number].T
        torch.testing.assert_close(found[number], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", ["of its tokens", "of all tokens"])
def test_a_medusa_head_of_the_commonest_tokens_says_them_in_ascending_order(
    rows: str, tmp_path: Path, target: TargetParts
) -> None:
    """As in vLLM the file may have rows of all tokens."""
    commonest, weight, full = torch.tensor([70, 5, 33, 6]), torch.randn(WIDTH, WIDTH) * 0.1, torch.randn(VOCAB, WIDTH)
    kept = full if rows == "of all tokens" else full[commonest]
    tensors = {"token_map": commonest, "blocks.0.layers.0.weight": weight, "lm_heads.0.weight": kept}
    config = {"architectures": ["MedusaModel"], "num_heads": 1, "vocab_size": VOCAB, "truncated_vocab_size": 4}
    loaded = load_head(written(tmp_path / "head", config, tensors), target, torch.float32)
    assert loaded.token_map is not None and loaded.token_map.tolist() == [5, 6, 33, 70]
    states = torch.randn(1, TOKENS, WIDTH)
    expected = (states + torch.nn.functional.silu(states @ weight.T)) @ full[loaded.token_map].T
    torch.testing.assert_close(asked(loaded, states)[1][0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"token_map": torch.tensor([3, VOCAB])}, "token_map: names tokens outside"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_a_medusa_head_that_does_not_fit_is_refused_by_name(
    more: dict[str, Any], message: str, tmp_path: Path, target: TargetParts
) -> None:
    config = {"model_type": "medusa", **{name: value for name, value in more.items() if name == "logit_scale"}}
    tensors = {"blocks.0.layers.0.weight": torch.zeros(WIDTH, WIDTH)}
    tensors |= {name: value for name, value in more.items() if name == "token_map"}
    with pytest.raises(HeadError, match=message):
        load_head(written(tmp_path / "head", config, tensors), target)


def test_a_layer_with_latent_attention_is_refused_before_its_experts_are_read(
    tmp_path: Path, target: TargetParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("input_layernorm", "mlp.experts.0.up_proj", "self_attn.kv_a_layernorm", "self_attn.kv_a_proj_with_mqa")
    tensors = {f"model.layers.1.{name}.weight": torch.zeros(2, 2) for name in names}
    path = written(tmp_path / "model", {**SHAPE, "num_nextn_predict_layers": 1}, tensors)
    read = list[str]()
    monkeypatch.setattr("outrider.heads.tensors.safe_open", partial(_Reading, read=read))
    with pytest.raises(HeadError, match=r"kv_a_proj_with_mqa.*latent attention"):
        load_head(path, target)
    assert not read


class _Reading:
    """Notes which tensors of a file are read."""

    def __init__(self, file: Path, framework: str, read: list[str]) -> None:
        self._stored, self._read = safe_open(file, framework=framework), read

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._stored.keys())

    def get_tensor(self, name: str) -> Tensor:
        self._read.append(name)
        return self._stored.get_tensor(name)


@pytest.mark.parametrize("name", ["model.mtp_layers.0.input_proj.weight", "model.mtp_block.0.mlp.up_proj.weight"])
def test_a_layer_of_another_family_is_refused_by_it(name: str, tmp_path: Path, target: TargetParts) -> None:
    config = {**SHAPE, "num_nextn_predict_layers": 1, "model_type": "mimo"}
    path = written(tmp_path / "model", config, {name: torch.zeros(2, 2)})
    with pytest.raises(HeadError, match=r"model\.layers\.1\.eh_proj\.weight: missing.*layers of mimo are not served"):
        load_head(path, target)


def test_a_model_that_states_no_layer_of_multi_token_prediction_is_no_head(tmp_path: Path) -> None:
    path = written(tmp_path / "model", {**SHAPE, "num_nextn_predict_layers": 0}, {"norm.weight": torch.ones(2)})
    assert not is_head(path)


def test_a_model_that_is_no_head_is_refused(tmp_path: Path, target: TargetParts) -> None:
    path = written(tmp_path / "model", {**SHAPE, "architectures": ["LlamaForCausalLM"]}, {"norm.weight": torch.ones(2)})
    with pytest.raises(HeadError, match=r"not a known draft head.*LlamaForCausalLM"):
        load_head(path, target)


def test_a_head_that_does_not_know_its_target_is_warned_of(
    tmp_path: Path, target: TargetParts, caplog: pytest.LogCaptureFixture
) -> None:
    """A Medusa head of identities: it says the token whose row is nearest to the state."""
    tensors = {"blocks.0.layers.0.weight": torch.zeros(WIDTH, WIDTH)}
    head = load_head(written(tmp_path / "head", {"medusa_num_heads": 1}, tensors), target, torch.float32)
    ids = torch.randint(0, VOCAB, (50,))
    knowing = torch.cat([target.head[ids[2:]], torch.zeros(2, WIDTH)])
    with caplog.at_level(logging.WARNING):
        assert self_check(head, ids, knowing) > 0.9 and not caplog.records
        assert self_check(head, ids, torch.randn(50, WIDTH)) < 0.1
    assert "may belong to another target" in caplog.text
