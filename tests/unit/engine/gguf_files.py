"""Tiny GGUF files of every architecture that is read, as llama.cpp's converter would write them, with any metadata.

Knows nothing of our conversion. What a file means is a config of transformers, written by hand in the tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, HEADS, KV_HEADS, WIDTH, CONTEXT = 300, 4, 2, 16, 128
_HIDDEN = HEADS * WIDTH
_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Of llama.cpp: transformers' model_type, more of its config, more metadata.
    "llama": ("llama", {}, {}),
    "mistral": ("mistral", {"sliding_window": 9}, {"attention.sliding_window": 9}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "phi3": ("phi3", {"sliding_window": None}, {"attention.sliding_window": 0}),
    "olmo2": ("olmo2", {}, {}),
    "smollm3": ("smollm3", {}, {}),
    "granite": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.25}, {"logit_scale": 4.0}),
    "gemma": ("gemma", {}, {}),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": WIDTH, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        {"attention.sliding_window": 24, "attention.sliding_window_pattern": 2},
    ),
    "qwen2moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
        },
    ),
    "qwen3moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
}
FAMILIES = tuple(_FAMILIES)
_NEIGHBOURS = {"llama", "mistral", "mixtral", "smollm3", "granite"}
"""Whose queries and keys llama.cpp rotates in pairs of neighbours."""


@dataclass(frozen=True)
class Setting:
    """Metadata and tensors of a file, and what they mean in a config."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Without the architecture before them, unless they begin with a dot."""
    config: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, list[float]] = field(default_factory=dict)


def architecture(family: str) -> str:
    """llama.cpp's name for it."""
    return "llama" if family in ("mistral", "mixtral") else family


def llama3_factors(rotated: int, base: float, scaling: dict[str, float]) -> list[float]:
    """As the converter computes what it writes into rope_freqs.weight."""
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling["original_max_position_embeddings"]
    found = []
    for i in range(0, rotated, 2):
        length = 2 * math.pi * base ** (i / rotated)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def reference(family: str, setting: Setting, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of the config, with random weights that bfloat16 holds."""
    kind, more, _ = _FAMILIES[family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, **setting.rope}
    if family == "gemma3" and "full_attention" not in setting.config.get("rope_parameters", {}):
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCAB,
            "hidden_size": _HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": WIDTH,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": family.startswith("gemma"),
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": None,
            "rope_parameters": rope,
            **more,
            **setting.config,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 or "bias" in name else 1.0, std=0.3)
            parameter.data = parameter.data.to(torch.bfloat16).float()
    return model.eval().to(dtype)


def write(file: Path, family: str, setting: Setting, model: Any = None, leave: str = "") -> Path:
    """Writes the file, without the metadata `leave`."""
    arch = architecture(family)
    writer = GGUFWriter(file, arch)
    keys = {
        "context_length": CONTEXT,
        "block_count": 2,
        "embedding_length": _HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": WIDTH,
        "attention.value_length": WIDTH,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": WIDTH,
        "rope.freq_base": 10000.0,
        "vocab_size": VOCAB,
        **_FAMILIES[family][2],
        **setting.keys,
    }
    for name, value in keys.items():
        if name != leave:
            _add(writer, name[1:] if name.startswith(".") else f"{arch}.{name}", value)
    _add_tokenizer(writer)
    _add_tensors(writer, family, model if model is not None else reference(family, setting))
    for name, factors in setting.tensors.items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)


def _add_tokenizer(writer: GGUFWriter) -> None:
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "<s>", "</s>", letters[40] + letters[40]]
    tokens += [f"<{i}>" for i in range(len(tokens), VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges([f"{letters[40]} {letters[40]}"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)


def _add_tensors(writer: GGUFWriter, family: str, model: Any) -> None:
    arch = architecture(family)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, 2)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and family.startswith("gemma"):
            continue
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(half))
        elif name.endswith("experts.down_proj"):
            writer.add_tensor(f"{names.get_name(name)}.weight", values)
        else:
            module, _, end = name.rpartition(".")
            writer.add_tensor(f"{names.get_name(module)}.{end}", _converted(family, name, values))


def _converted(family: str, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    if name.endswith("norm.weight") and family.startswith("gemma"):
        return values + 1
    if name.endswith("shared_expert_gate.weight"):
        return values[0]
    if family in _NEIGHBOURS and ("q_proj" in name or "k_proj" in name):
        heads = HEADS if "q_proj" in name else KV_HEADS
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values
