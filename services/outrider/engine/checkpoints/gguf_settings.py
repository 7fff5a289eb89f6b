"""What the metadata of a GGUF file says of its model, as settings of a transformers config. Reads no weights.

Every key is read here, or read by the tokenizer, or known to be without effect; a file with any other is refused by
its name. So is a value that the model of transformers cannot take. The keys are llama.cpp's (gguf-py's `Keys`), and so
is what they mean where they are missing.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.checkpoint_files import MAX_LAYERS
from outrider.engine.checkpoints.checkpoints import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

log = logging.getLogger(__name__)

_WITHOUT_EFFECT = re.compile(
    # What the file is, and how it was made.
    r"GGUF\..*|general\.(?!type$|sampling\.).*|split\.(no|tensors\.count)|(quantize\.)?imatrix\..*|mradermacher\..*"
    # Read by the tokenizer.
    r"|tokenizer\.ggml\.(model|pre|tokens|token_type|scores|merges|add_(bos|eos)_token|add_space_prefix)"
    r"|tokenizer\.ggml\.(bos|eos|eot|eom|unknown|padding)_token_id|tokenizer\.chat_template(s|\..*)?"
    # Of other kinds of models or tokenizers; marks for filling in; the tokenizer once more.
    r"|tokenizer\.ggml\.(seperator|mask|cls|prefix|suffix|middle|fim_\w+)_token_id|tokenizer\.huggingface\.json"
    r"|tokenizer\.ggml\.(token_type_count|remove_extra_whitespaces)"
)
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Of `general.sampling`, and generation_config.json's names for them."""
ROTARY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How an architecture of GGUF becomes a model of transformers."""

    kind: str
    """Its model_type."""
    more: Callable[[Metadata, dict[str, Any]], None] = lambda metadata, settings: None
    """Adds what only this family has."""
    rotates_neighbours: bool = False
    """The rows of queries and keys are in another order than in transformers, which rotates halves."""
    added_to_norms: float = 0.0


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a file says of its model."""

    family: GgufFamily
    kind: str
    settings: dict[str, Any]
    sampling: dict[str, float]


def read(file: Path, reader: GGUFReader) -> GgufModel:
    """Raises CheckpointError that names a key."""
    return Metadata(file, reader).model()


class Metadata:
    """The keys of one file. Remembers which were read."""

    def __init__(self, file: Path, reader: GGUFReader) -> None:
        self._file = file
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._read: set[str] = set()
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._prefix = str(self._whole("general.architecture", "")) + "."

    def model(self) -> GgufModel:
        if (parts := int(self._whole("split.count", 1))) > 1:
            raise self.error("split.count", f"one of {parts} files; llama-gguf-split --merge joins them")
        architecture = self._prefix[:-1]
        family = FAMILIES.get(architecture)
        if family is None:
            known = ", ".join(sorted(FAMILIES))
            raise self.error("general.architecture", f"{architecture!r} is none of {known}")
        for key, *harmless in (("general.type", "model"), ("tokenizer.ggml.add_sep_token", False)):
            self._only(key, self._whole(key, harmless[0]), harmless)
        if self._whole("tokenizer.ggml.precompiled_charsmap", None):
            raise self.error("tokenizer.ggml.precompiled_charsmap", "is not read")
        settings = self._common()
        kind = family.kind
        settings["rope_parameters"] = self.rope(settings)
        family.more(self, settings)
        kind = settings.pop("model_type", kind)
        sampling = self._sampling()
        self._refuse_rest()
        return GgufModel(family, kind, settings, sampling)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of the architecture's key `name`."""
        return self._whole(self._prefix + name, default)

    def only(self, name: str, *harmless: Any) -> None:
        """Refuses another value of the key, which may be missing."""
        self._only(self._prefix + name, self.get(name, harmless[0]), harmless)

    def must(self, name: str) -> Any:
        if (found := self.get(name)) is None:
            raise self.error(self._prefix + name, "missing")
        return found

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(str(self._file), f"{key}: {message}")

    def window(self) -> int | None:
        """In positions."""
        return int(self.get("attention.sliding_window", 0)) or None

    def _whole(self, key: str, default: Any) -> Any:
        self._read.add(key)
        found = self._fields.get(key, default)
        if isinstance(found, float) and not math.isfinite(found):
            raise self.error(key, f"{found} is no number")
        return found

    def _only(self, key: str, value: Any, harmless: Any) -> None:
        if not any(_equal(value, other) for other in harmless):
            raise self.error(key, f"{_short(value)} is not read, only {' or '.join(map(str, harmless))}")

    def _layers(self) -> int:
        if not 1 <= (found := int(self.must("block_count"))) <= MAX_LAYERS:
            raise self.error(self._prefix + "block_count", f"{found} is not from 1 to {MAX_LAYERS}")
        return found

    def _one(self, name: str, default: Any = None) -> int:
        """A number that may be given for each layer, if it is the same of all."""
        found = self.must(name) if default is None else self.get(name, default)
        values = set(found) if isinstance(found, list) else {found}
        if len(values) != 1:
            raise self.error(self._prefix + name, "its layers differ, which no model here has")
        return int(values.pop())

    def _common(self) -> dict[str, Any]:
        hidden, heads = int(self.must("embedding_length")), self._one("attention.head_count")
        width = int(self.get("attention.key_length", hidden // heads))
        self.only("attention.value_length", width)
        self.only("attention.causal", True)
        if (embedding := self.tensors.get("token_embd.weight")) is None:
            raise self.error("token_embd.weight", "missing")
        rows = int(embedding.shape[-1])
        # Without effect where there is a tokenizer, as in llama.cpp.
        self.get("vocab_size")
        biased = {part for part in ("attn_q.bias", "ffn_up.bias") if f"blk.0.{part}" in self.tensors}
        of_layers = {"attention_bias": "attn_q.bias" in biased, "mlp_bias": "ffn_up.bias" in biased}
        ids = ("bos", "eos", "padding")
        bos, eos, padding = (self._whole(f"tokenizer.ggml.{name}_token_id", None) for name in ids)
        return {
            "vocab_size": rows,
            "max_position_embeddings": int(self.must("context_length")),
            "num_hidden_layers": self._layers(),
            "hidden_size": hidden,
            "intermediate_size": self._one("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._one("attention.head_count_kv", heads),
            "head_dim": width,
            "rms_norm_eps": float(self.must("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": padding,
            **{name: True for name, found in of_layers.items() if found},
        }

    def rope(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Of all layers, or of those with full attention, if the others have another."""
        width, context = settings["head_dim"], settings["max_position_embeddings"]
        rotated = int(self.get("rope.dimension_count", width))
        base: dict[str, Any] = {"rope_type": "default", "rope_theta": float(self.get("rope.freq_base", 10000.0))}
        kind = self.get("rope.scaling.type")
        # The second is its old name.
        factor = float(self.get("rope.scaling.factor", 0.0) or self.get("rope.scale_linear", 0.0) or 1.0)
        original = int(self.get("rope.scaling.original_context_length", context))
        freqs, long, short = (self._factors(name, rotated) for name in ROTARY_TENSORS)
        self.only("rope.scaling.alpha", 0.0, 1.0)
        self.only("rope.scaling.yarn_log_multiplier", 0.0)
        # It says of the weights how they were trained.
        self.get("rope.scaling.finetuned")
        settings["partial_rotary_factor"] = rotated / width
        if kind == "longrope" or long or short:
            self._only(self._prefix + "rope.scaling.type", kind, ("longrope", None))
            self._only(self._prefix + "rope.scaling.factor", factor, (1.0,))
            if not long or not short or freqs:
                raise self.error("rope_factors_long.weight, rope_factors_short.weight", "one without the other")
            scale = float(self.must("rope.scaling.attn_factor"))
            settings["original_max_position_embeddings"] = original
            return base | _factored(short, long, original, scale)
        if freqs:
            # They divide the frequencies: those that Llama 3.1 and later changed.
            self._only(self._prefix + "rope.scaling.type", kind, ("linear", "none", None))
            self._only(self._prefix + "rope.scaling.factor", factor, (1.0,))
            self.only("rope.scaling.attn_factor", 1.0)
            return base | _factored(freqs, freqs, context, 1.0) if set(freqs) != {1.0} else base
        self.only("rope.scaling.attn_factor", 1.0)
        if kind == "yarn":
            self.only("rope.scaling.yarn_ext_factor", 1.0)
            names = {
                "yarn_attn_factor": "attention_factor",
                "yarn_beta_fast": "beta_fast",
                "yarn_beta_slow": "beta_slow",
            }
            stated = {ours: self.get(f"rope.scaling.{name}") for name, ours in names.items()}
            more = {name: float(value) for name, value in stated.items() if value is not None}
            return base | {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                **more,
            }
        self._only(self._prefix + "rope.scaling.type", kind, ("linear", "none", None))
        if kind == "none":
            self._only(self._prefix + "rope.scaling.factor", factor, (1.0,))
        return base | {"rope_type": "linear", "factor": factor} if factor != 1.0 else base

    def _factors(self, name: str, rotated: int) -> list[float]:
        if (tensor := self.tensors.get(name)) is None:
            return []
        from gguf import dequantize

        found: list[float] = dequantize(tensor.data, tensor.tensor_type).reshape(-1).tolist()
        if len(found) != rotated // 2 or min(found) <= 0:
            raise self.error(name, f"{len(found)} factors for {rotated} rotated numbers, or one that is not positive")
        return found

    def _sampling(self) -> dict[str, float]:
        keys = {key for key in self._fields if key.startswith("general.sampling.")}
        taken = {ours: self._whole(f"general.sampling.{name}", None) for name, ours in _SAMPLING.items()}
        if others := sorted(keys - self._read):
            log.info("%s: not taken, as no sampling here has it: %s", self._file.name, ", ".join(others))
        self._read |= keys
        return {name: value for name, value in taken.items() if value is not None}

    def _refuse_rest(self) -> None:
        rest = sorted(key for key in self._fields.keys() - self._read if not _WITHOUT_EFFECT.fullmatch(key))
        if rest:
            raise self.error(
                ", ".join(rest),
                "not read here, and may change what the model says; gguf-new-metadata --remove-metadata drops it",
            )


def _factored(short: list[float], long: list[float], original: int, scale: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": scale,
    }


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, float) or isinstance(other, float):
        # Of the 32 bits in the file.
        return isinstance(value, int | float) and bool(abs(value - other) <= 1e-6 * abs(other))
    return bool(value == other)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _llama(metadata: Metadata, settings: dict[str, Any]) -> None:
    """Mistral's and Mixtral's are of the same architecture."""
    experts = int(metadata.get("expert_count", 0))
    if (window := metadata.window()) is not None or experts:
        settings |= {"model_type": "mistral", "sliding_window": window}
    if experts:
        settings["model_type"] = "mixtral"
        settings |= {"num_local_experts": experts, "num_experts_per_tok": int(metadata.must("expert_used_count"))}
        metadata.only("expert_feed_forward_length", settings["intermediate_size"])
        metadata.only("expert_weights_norm", True)
        _experts(metadata)
    else:
        metadata.only("expert_used_count", 0)
    _rotated_whole(metadata, settings)


def _experts(metadata: Metadata) -> None:
    metadata.only("expert_weights_scale", 1.0, 0.0)
    # 1 is softmax.
    metadata.only("expert_gating_func", 1)
    for name in ("expert_group_count", "expert_group_used_count", "leading_dense_block_count"):
        metadata.only(name, 0, 1) if "group" in name else metadata.only(name, 0)


def _rotated_whole(metadata: Metadata, settings: dict[str, Any]) -> None:
    """Their models in transformers rotate whole heads."""
    if settings.pop("partial_rotary_factor") != 1.0:
        metadata.only("rope.dimension_count", settings["head_dim"])


def _phi3(metadata: Metadata, settings: dict[str, Any]) -> None:
    kind = settings["rope_parameters"]["rope_type"]
    if kind not in ("default", "longrope"):
        raise metadata.error("phi3.rope.scaling.type", f"{kind} is not read, only longrope")
    settings["sliding_window"] = metadata.window()


def _granite(metadata: Metadata, settings: dict[str, Any]) -> None:
    metadata.only("rope.scaling.finetuned", True)
    multipliers = {
        "logits_scaling": metadata.must("logit_scale") or 1.0,
        "residual_multiplier": metadata.get("residual_scale", 0.0) or 1.0,
        "embedding_multiplier": metadata.get("embedding_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.get("attention.scale", 0.0) or settings["head_dim"] ** -0.5,
    }
    settings |= {name: float(value) for name, value in multipliers.items()}
    _rotated_whole(metadata, settings)


def _gemma3(metadata: Metadata, settings: dict[str, Any]) -> None:
    _rotated_whole(metadata, settings)
    layers, window = settings["num_hidden_layers"], metadata.window()
    pattern = metadata.get("attention.sliding_window_pattern", 6)
    slides = pattern if isinstance(pattern, list) else [(i + 1) % int(pattern) != 0 for i in range(layers)]
    if len(slides) != layers:
        raise metadata.error("attention.sliding_window_pattern", f"of {len(slides)} layers, and there are {layers}")
    kinds = ["sliding_attention" if window and slid else "full_attention" for slid in slides]
    full = settings["rope_parameters"]
    if window and full["rope_type"] not in ("default", "linear"):
        raise metadata.error("gemma3.rope.scaling.type", f"{full['rope_type']} beside layers with a window is not read")
    inside = {"rope_type": "default", "rope_theta": float(metadata.get("rope.freq_base_swa", 10000.0))}
    of_heads = settings["head_dim"]
    if layers == _GEMMA3_27B_LAYERS:
        # The largest of the family, by which llama.cpp knows it too.
        of_heads = settings["hidden_size"] // settings["num_attention_heads"]
    metadata.only("attention.scale", of_heads**-0.5, 0.0)
    settings |= {
        "sliding_window": window,
        "layer_types": kinds,
        "rope_parameters": {"full_attention": full, "sliding_attention": inside},
        "query_pre_attn_scalar": of_heads,
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or None,
    }
    metadata.only("attn_logit_softcapping", 0.0)


def _qwen2moe(metadata: Metadata, settings: dict[str, Any]) -> None:
    _qwen3moe(metadata, settings)
    shared = int(metadata.get("expert_shared_feed_forward_length", settings["intermediate_size"]))
    settings |= {
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
    }


def _qwen3moe(metadata: Metadata, settings: dict[str, Any]) -> None:
    used = int(metadata.must("expert_used_count"))
    width = int(metadata.get("expert_feed_forward_length", settings["intermediate_size"] // used))
    settings |= {
        "num_experts": int(metadata.must("expert_count")),
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "norm_topk_prob": metadata.get("expert_weights_norm", True),
    }
    _experts(metadata)
    _rotated_whole(metadata, settings)


FAMILIES = {
    "gemma": GgufFamily("gemma", _rotated_whole, added_to_norms=1.0),
    "gemma3": GgufFamily("gemma3_text", _gemma3, added_to_norms=1.0),
    "granite": GgufFamily("granite", _granite, rotates_neighbours=True),
    "llama": GgufFamily("llama", _llama, rotates_neighbours=True),
    "olmo2": GgufFamily("olmo2", _rotated_whole),
    "phi3": GgufFamily("phi3", _phi3),
    "qwen2": GgufFamily("qwen2", _rotated_whole),
    "qwen2moe": GgufFamily("qwen2_moe", _qwen2moe),
    "qwen3": GgufFamily("qwen3", _rotated_whole),
    "qwen3moe": GgufFamily("qwen3_moe", _qwen3moe),
    "smollm3": GgufFamily("smollm3", _rotated_whole, rotates_neighbours=True),
}
"""By `general.architecture`."""
