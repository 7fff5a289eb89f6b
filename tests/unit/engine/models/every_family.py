"""Every decoder of the installed transformers, small and with random weights: as it is, and with each field changed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from outrider.engine import CheckpointError, Engine, EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from outrider.testing.tiny import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Settings = dict[str, Any]

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
DECODERS_IF_TOLD = {
    *("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm"),
    *("roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}
"""Encoders, unless their config has `is_decoder`."""
_SMALL = (
    (("token_id",), 3),
    (("vocab",), 384),
    (("topk_group", "n_group"), 1),
    (("per_tok", "top_k", "topk", "moe_k"), 2),
    (("shared_experts",), 1),
    (("experts",), 4),
    (("key_value_heads", "kv_heads"), 2),
    (("head_dim", "d_kv", "kv_channels"), 16),
    (("heads", "n_head"), 4),
    (("layers", "n_layer"), 3),
    (("intermediate", "ffn", "inner", "d_ff"), 96),
    (("hidden_size", "d_model", "embd", "embed", "embedding_size", "dim_model"), 64),
    (("rank",), 16),
    (("position", "n_ctx", "max_seq", "seq_length"), 256),
    (("window",), 9),
    (("chunk_size",), 16),
    (("size",), 64),
    (("dim",), 16),
)
"""A number whose name has one of these parts becomes that, if it is larger. The first line counts."""
_MAMBA: Settings = {"hidden_size": 64, "num_hidden_layers": 3}
_NEEDED: dict[str, Settings] = {
    "bamba": {**_MAMBA, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "swa_head_dim": 16}
    | {"num_key_value_heads": 4, "num_attention_heads": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**_MAMBA, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1}
    | {"layer_types": ["mamba", "attention", "mamba"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba2": {**_MAMBA, "expand": 2, "num_heads": 4, "head_dim": 32, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "xlnet": {"d_model": 64, "n_head": 4, "d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {**_MAMBA, "n_mamba_heads": 4, "mamba_headdim": 32, "mamba_ngroups": 1, "num_mem_blocks": 1}
    | {"layer_types": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1], "attention_head_dim": 32}
    | {"attention_hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
}
"""What transformers cannot run them without."""
SLIDING, FULL = "sliding_attention", "full_attention"
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_ROTARY: tuple[Settings, ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    _YARN,
    {**_YARN, "attention_factor": 1.7},
    {**_YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {**_YARN, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
)
_TOGETHER: tuple[Settings, ...] = (
    {"sliding_window": 9, "use_sliding_window": True},
    {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 9, "layer_types": [FULL, SLIDING, FULL]},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"partial_rotary_factor": 0.5},
    {"attention_bias": True, "mlp_bias": True},
)
_SAME_ANSWERS = {
    *("architectures", "dtype", "id2label", "label2id", "return_dict", "use_cache", "problem_type", "model_type"),
    *("transformers_version", "vocab_size", "vision_config", "audio_config", "output_attentions", "is_encoder_decoder"),
    *("output_hidden_states", "chunk_size_feed_forward", "initializer_range", "use_bidirectional_attention"),
}
"""Fields that no answer of a decoder depends on, or that make none of it."""
_LENGTHS, _FIRST, _NEXT = (45, 30), 20, 5


class Verdict(NamedTuple):
    kind: str
    """equal, refused, wrong; failed: it is not loaded, with no word of what is wrong; invalid: transformers itself
    cannot run it."""
    why: str


def base(family: str) -> Settings:
    """The fields that make a small model of it. Raises what transformers raises of a family without defaults."""
    needed = _NEEDED.get(family, {})
    told = {"is_decoder": True} if family in DECODERS_IF_TOLD else {}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return {**_small(CONFIG_MAPPING[family](**needed).to_dict()), **ends, **told, **needed}


def _small(stated: Mapping[str, Any]) -> Settings:
    found: Settings = {}
    for name, value in stated.items():
        if isinstance(value, dict) and name.endswith("_config"):
            found[name] = {**_small(value), **{key: value[key] for key in ("model_type",) if key in value}}
        elif isinstance(value, int) and not isinstance(value, bool):
            least = next((number for parts, number in _SMALL if any(part in name for part in parts)), value)
            found[name] = min(value, least)
    return found


def changed(family: str) -> Iterator[tuple[str, Settings]]:
    """Each field of its config with other values, one at a time, and some that belong together."""
    start = base(family)
    for path, value in _changes(CONFIG_MAPPING[family](**start).to_dict(), ()):
        settings = copy.deepcopy(start)
        inner = settings
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
        yield f"{'.'.join(path)}={value}", settings
    for together in _TOGETHER:
        yield str(together), {**start, **together}


def _changes(stated: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in stated.items():
        at = (*path, name)
        if name.endswith("config") and isinstance(value, dict) and name not in _SAME_ANSWERS:
            yield from _changes(value, at)
        elif name not in _SAME_ANSWERS and (name == "pad_token_id" or not name.endswith("_token_id")):
            yield from ((at, other) for other in _others(name, value))


def _others(name: str, value: Any) -> Iterator[Any]:
    if name == "pad_token_id":
        yield from (7, None)
    elif name == "layer_types" and value:
        yield from ([SLIDING] * len(value), [FULL] * len(value), ([FULL, SLIDING] * len(value))[: len(value)])
    elif name in ("rope_parameters", "rope_scaling"):
        yield from ({"rope_theta": 1e4, **form} for form in _ROTARY)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, float):
        yield value * 1.5 or 0.3
    elif isinstance(value, int):
        yield from _numbers(name, value)
    elif value is None:
        yield from (5, 30) if "window" in name else (0.5, 30.0) if "cap" in name else (True, 2.0, 32)
    elif isinstance(value, str) and "act" in name:
        yield from ("relu", "gelu", "silu", "gelu_pytorch_tanh")


def _numbers(name: str, value: int) -> Iterator[int]:
    if "kv_heads" in name or "key_value_heads" in name:
        yield from (1, 4)
    elif "head_dim" in name:
        yield from (24, 32)
    elif "window" in name:
        yield from (5, 33)
    elif "position" in name or name == "n_ctx":
        yield from (40, 64)
    else:
        none = set() if any(part in name for part in ("size", "dim", "heads", "layers")) else {0}
        yield from {value + 1, max(1, value // 2), *none} - {value}


def text(length: int, seed: int) -> list[int]:
    return torch.randint(10, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def verdict(family: str, settings: Settings, dtype: str = "float32") -> Verdict:
    """What the engine makes of such a model, by its logits and those of transformers."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        try:
            wanted = _by_transformers(_written(family, settings, path))
        except Exception as error:  # of many kinds
            return Verdict("invalid", f"{type(error).__name__}: {error}")
        try:
            engine = load_engine(path, EngineConfig(dtype=dtype, num_blocks=32))
        except CheckpointError as error:
            return Verdict("refused", str(error))
        except Exception as error:  # of many kinds
            return Verdict("failed", f"{type(error).__name__}: {error}")
        found = _by_engine(engine)
    errors = [_error(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)]
    return Verdict("equal" if max(errors) < 1e-4 else "wrong", f"{max(errors):.1e}, {engine.info.execution}")


def _written(family: str, settings: Settings, path: Path) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
        for parameter in model.parameters():
            # Loud, so that each part of the model shows in its logits.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
            else:
                parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return loaded


@torch.inference_mode()
def _by_transformers(model: PreTrainedModel) -> list[torch.Tensor]:
    found = [model(torch.tensor([text(length, length)])).logits[0] for length in _LENGTHS]
    if not all(bool(logits.isfinite().all()) for logits in found):
        raise ValueError("its logits are no numbers")
    return found


def _by_engine(engine: Engine) -> list[torch.Tensor]:
    """Both texts in the same steps."""
    texts = [text(length, length)[: engine.info.max_context_len] for length in _LENGTHS]
    sequences = [engine.kv.open([]) for _ in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    while rest := [i for i, ids in enumerate(texts) if len(sequences[i].tokens) < len(ids)]:
        rows = []
        for i in rest:
            done = len(sequences[i].tokens)
            part = texts[i][done : done + (_NEXT if done else _FIRST)]
            rows.append(Row(sequences[i], part, len(part)))
        for i, logits in zip(rest, engine.forward(rows).clone().split([len(r.token_ids) for r in rows]), strict=True):
            found[i].append(logits)
    return [torch.cat(parts) for parts in found]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    wanted = wanted[: len(found), : found.shape[1]]
    return float((found - wanted).abs().max() / (wanted - wanted.mean(-1, keepdim=True)).abs().max())
