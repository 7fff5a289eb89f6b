"""The tensors of a head's checkpoint: read, undone of their 8 bits, and put where they belong or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import LlamaConfig

from outrider.checkpoint_files import number_problem
from outrider.heads.interface import HeadError, HeadSettings

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SCALE = ".scale"
_QUANTIZED = "quantized weights (quantization_config) are not served in heads"
_UNSERVED = {
    "kv_a_proj_with_mqa": "multi-head latent attention is not served in heads",
    "experts.": "experts are not served in heads",
    "linear_attn": "linear attention is not served in heads",
    "mask_hidden": "parallel drafting, as P-EAGLE does it, is not served in heads",
    "weight_scale": _QUANTIZED,
    "weight_packed": _QUANTIZED,
    "qweight": _QUANTIZED,
}


_ROTARY_KINDS = {"default", "linear", "llama3", "yarn", "mrope"}
"""Whose frequencies depend on no text's length."""
_OF_LENGTHS = {"dynamic", "longrope"}
"""In our own heads they are those of texts within the original positions, as their targets write: `Rotary`."""
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Fields of models that take images: texts have the same position in all sections."""


def tensor_names(path: Path) -> set[str]:
    """Of all safetensors files of a directory; those of a damaged file are left out."""
    found = set[str]()
    for file in path.glob("*.safetensors"):
        with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as stored:
            found.update(stored.keys())
    return found


def read_tensors(path: Path, rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Of all safetensors files of a directory, the tensors that get a name; others are never read."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = [file.name for file in sorted(path.glob("*")) if file.suffix in _PICKLED]
        if pickled:
            raise HeadError(
                f"{path}/{pickled[0]}", "pickled weights run code when they are read; convert to safetensors"
            )
        raise HeadError(f"{path}/model.safetensors", "missing")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                named = {name: rename(name) for name in stored.keys()}  # noqa: SIM118 - safe_open is no mapping
                names = {name: ours for name, ours in named.items() if ours is not None}
                _refuse_unserved(names.values())
                found |= {ours: stored.get_tensor(name) for name, ours in names.items()}
        except SafetensorError as error:
            raise HeadError(str(file), f"not a sound safetensors file: {error}") from None
    return _without_scales(found)


def _refuse_unserved(names: Collection[str]) -> None:
    """Before they are read: experts are many GB."""
    for part, reason in _UNSERVED.items():
        if (found := next((name for name in names if part in name), None)) is not None:
            raise HeadError(found, reason)


def _without_scales(found: dict[str, Tensor]) -> dict[str, Tensor]:
    for name in [name for name, value in found.items() if value.dtype == torch.int8]:
        if name + _SCALE not in found:
            raise HeadError(name + _SCALE, "missing")
        found[name] = found[name].float() * found.pop(name + _SCALE).float()[:, None]
    return found


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Gives each parameter its tensor. Raises HeadError for one that is missing, too many or of another shape."""
    wanted = module.state_dict()
    for name, value in tensors.items():
        if name not in wanted:
            raise HeadError(name, "no such tensor in this kind")
        if value.shape != wanted[name].shape:
            raise HeadError(name, f"has the shape {list(value.shape)}, config.json asks for {list(wanted[name].shape)}")
        if not value.is_floating_point() or value.dtype.itemsize < 2:
            raise HeadError(name, f"is of {value.dtype}; {_QUANTIZED}")
        if not value.isfinite().all():
            raise HeadError(name, "has values that are no numbers")
    if missing := sorted(set(wanted) - set(tensors)):
        raise HeadError(missing[0], "missing")
    module.load_state_dict({name: value.to(wanted[name].dtype) for name, value in tensors.items()})


def settings_of(
    config: Mapping[str, Any], path: Path, layers: int | None = None, *, ours: bool = False
) -> HeadSettings:
    """The decoder layers that a config.json describes. Raises HeadError that names the missing field."""
    if (problem := number_problem(config)) is not None:
        raise HeadError(f"{path}/config.json", problem)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise HeadError(f"{path}/config.json", f"hidden_act {activation}: only silu is served in heads")
    kind = str(config.get("model_type", "llama"))
    try:
        width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or width // heads)
        return HeadSettings(
            width=width,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            inner=int(config["intermediate_size"]),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rotary=_rotary(config, width, heads, head_dim, _ROTARY_KINDS | _OF_LENGTHS if ours else _ROTARY_KINDS),
            layers=layers or int(config.get("num_hidden_layers", 1)),
            bias=bool(config.get("attention_bias", kind == "qwen2")),
            qk_norm=kind.startswith("qwen3"),
            gated=kind.startswith(("qwen3_next", "qwen3_5")),
        )
    except (KeyError, TypeError) as error:
        raise HeadError(f"{path}/config.json", f"{type(error).__name__}: {error}") from None
    except ValueError as error:
        raise HeadError(f"{path}/config.json", str(error)) from None


def counted_settings(path: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> HeadSettings:
    """What tensors show is counted: many a config.json has the numbers of the target."""
    attention = "layers.0.self_attn."
    if (queries := tensors.get(f"{attention}q_proj.weight")) is not None and config.get("num_attention_heads"):
        config = {**config, "head_dim": len(queries) // int(config["num_attention_heads"])}
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    return replace(
        settings_of(config, path, layers=len(layers)),
        bias=f"{attention}q_proj.bias" in tensors,
        qk_norm=f"{attention}q_norm.weight" in tensors,
        gated=False,
    )


def _rotary(config: Mapping[str, Any], width: int, heads: int, head_dim: int, kinds: Collection[str]) -> LlamaConfig:
    """Raises ValueError that names the field."""
    stated = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    if parts := [name for name, value in stated.items() if isinstance(value, dict)]:
        raise ValueError(f"rope_parameters: those of {', '.join(parts)} are not served in heads")
    kind, old_name = (stated.pop(name, None) for name in ("rope_type", "type"))
    kind = kind or old_name or "default"
    if kind not in kinds:
        raise ValueError(f"rope_scaling: rope_type {kind} is not served in heads")
    for name in _OF_IMAGES:
        stated.pop(name, None)
    stated["rope_type"] = "default" if kind == "mrope" else kind
    stated.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    if (problem := number_problem(stated)) is not None:
        raise ValueError(f"rope_parameters: {problem}")
    if (original := config.get("original_max_position_embeddings")) and kind == "longrope":
        stated.setdefault("original_max_position_embeddings", original)
    share = float(stated.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1)
    positions = config.get("max_position_embeddings")
    return LlamaConfig(
        hidden_size=width,
        num_attention_heads=heads,
        head_dim=round(head_dim * share),
        rope_parameters=stated,
        **({"max_position_embeddings": positions} if positions else {}),
    )


def take_token_map(tensors: dict[str, Tensor], vocab: int) -> Tensor | None:
    """Takes d2t, the distance from each of the head's ids to the target's, and t2d, which marks the target's ids that
    it has. Returns the target's ids in ascending order, in which it brings the rows of lm_head.weight."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        return None
    ids, order = ascending("d2t", d2t.long() + torch.arange(len(d2t)), vocab)
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], ids):
        raise HeadError("d2t", "names other tokens than t2d")
    if (rows := tensors.get("lm_head.weight")) is not None and len(rows) == len(order):
        # ModelOpt's begin with that of the commonest token.
        tensors["lm_head.weight"] = rows[order]
    return ids


def ascending(name: str, ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Token ids in ascending order, and where each was."""
    ids, order = ids.long().sort()
    if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < vocab):
        raise HeadError(name, f"names tokens outside the target's vocabulary of {vocab}")
    if bool((ids.diff() == 0).any()):
        raise HeadError(name, "names a token twice")
    return ids, order
