"""How many positions of a model are served, and why not more; which fields of its rotary embedding have an effect.

Reads a transformers config and transformers' own code; knows no weights.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from outrider.checkpoint_files import OTHER_ENGINE

log = logging.getLogger(__name__)

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

_ORIGINAL = "original_max_position_embeddings"
_NEEDED = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", _ORIGINAL},
    "longrope": {"short_factor", "long_factor", _ORIGINAL},
    "llama3": {"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"},
}
"""By `rope_type`: the fields without which transformers has no frequencies."""
_TAKEN = {
    "yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"attention_factor", "factor"},
    "proportional": {"factor", "partial_rotary_factor"},
}
"""What else has an effect there."""
_HARMLESS = {
    "rope_type",
    "type",
    "rope_theta",
    "finetuned",
    "mrope_section",
    "mrope_interleaved",
    "max_position_embeddings",
}
"""In any rotary embedding. Sections of images and texts rotate by the same positions, where all is text."""

_MAX_POSITIONS = 1 << 24
"""The tables of a rotary embedding have all of them."""

_OF_OTHERS = (
    "sliding_window",
    "attention_chunk_size",
    "rope_parameters",
    "partial_rotary_factor",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "residual_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "logit_scale",
    "attention_bias",
    "mlp_bias",
)
"""Fields that change what a model says, in families that have them."""


def context_len(settings: Any, configured: int | None = None) -> int:
    """The least of the model's positions, the configured cap, a chunk of its attention, and the positions up to which
    its rotary embedding does not depend on the length of a text. Raises ValueError that names the field at fault."""
    layer_windows(settings)
    _check_rotary(settings)
    if idle := [name for name in _OF_OTHERS if _of_others(name, settings)]:
        named = ", ".join(f"{name}: {getattr(settings, name)}" for name in idle)
        log.warning("config.json: %s has no effect: a %s has none", named, settings.model_type)
    positions = num_positions(settings)
    limits = {"its positions": positions}
    if configured is not None:
        limits["max_context_len"] = configured
    if _CHUNKED in _layer_kinds(settings):
        # Within its first chunk, an attention equals full attention.
        limits["the chunks of its attention"] = _width(settings, "attention_chunk_size", _CHUNKED)
    for limit in _rotary_limits(settings):
        limits["its rotary embedding, which changes beyond them"] = limit
    reason = min(limits, key=limits.__getitem__)
    if limits[reason] < positions:
        log.info("%d of the model's %d positions are served: %s", limits[reason], positions, reason)
    return limits[reason]


def num_positions(settings: Any) -> int:
    """Of a model, whatever engine runs it. Raises ValueError that names the field at fault."""
    stated = getattr(settings, "max_position_embeddings", None)
    if not stated:
        raise ValueError("max_position_embeddings: missing")
    if not 1 <= (found := _lengthened(settings, int(stated))) <= _MAX_POSITIONS:
        raise ValueError(f"max_position_embeddings: {found} positions; from 1 to {_MAX_POSITIONS} are served")
    return found


def _lengthened(settings: Any, stated: int) -> int:
    """The `stated` positions, or more if the scaling of the rotary embedding lengthens those before it, as in vLLM: its
    factor times them. A line says so, or why not."""
    found = getattr(settings, "rope_parameters", None) or {}
    by_kinds = isinstance(found.get(_FULL), dict)
    rope: dict[str, Any] = found[_FULL] if by_kinds else found
    factor: Any
    original: Any
    kind, factor, original = rope.get("rope_type", "default"), rope.get("factor"), rope.get(_ORIGINAL)
    scaled = {"yarn": lambda: int(original * factor), "linear": lambda: int(stated * factor)}
    positions = scaled[kind]() if kind in scaled and (kind, by_kinds) != ("linear", True) else stated
    if positions > stated:
        of = _ORIGINAL if kind == "yarn" else "max_position_embeddings"
        message = "%d positions: %s times the factor %s of its %s rotary embedding; max_position_embeddings says %d"
        log.info(message, positions, of, factor, kind, stated)
        return positions
    idle = {
        "linear": by_kinds,
        "yarn": positions < stated,
        "llama3": kind == "llama3" and stated <= original,
        "dynamic": True,
    }
    if idle.get(kind):
        message = "%d positions, as max_position_embeddings says: the factor %s of its %s rotary embedding adds none"
        log.info(message, stated, factor, kind)
    return stated


def layer_windows(settings: Any) -> tuple[int | None, ...]:
    """Of each layer, how many positions it looks back at most, its own included; None: all. Raises ValueError."""
    kinds = _layer_kinds(settings)
    width = _width(settings, "sliding_window", _SLIDING) if _SLIDING in kinds else None
    return tuple(width if kind == _SLIDING else None for kind in kinds)


def _layer_kinds(settings: Any) -> list[str]:
    kinds = getattr(settings, "layer_types", None)
    if kinds is None:
        # transformers' models without kinds of layers give all of them the window, if they have one. Qwen's configs
        # name one and turn it off; and Llama's class has none, whatever its config says.
        used = getattr(settings, "use_sliding_window", True) is not False and hasattr(type(settings), "sliding_window")
        return [_SLIDING if used and settings.sliding_window else _FULL] * int(settings.num_hidden_layers)
    if unknown := sorted(set(kinds) - {_FULL, _SLIDING, _CHUNKED}):
        named = ", ".join(unknown)
        raise ValueError(f"layer_types: layers of kind {named} are no attention over keys and values; {OTHER_ENGINE}")
    return list(kinds)


def _width(settings: Any, field: str, kind: str) -> int:
    width = getattr(settings, field, None)
    if width is None:
        raise ValueError(f"{field}: missing, though layer_types has {kind}")
    if int(width) < 1:
        raise ValueError(f"{field}: {width} positions are no window; without one it is null")
    return int(width)


def _rotary_limits(settings: Any) -> Iterator[int]:
    """Positions up to which the frequencies of a layer are always the same.

    Beyond them longrope and dynamic have other ones, for all positions and for all texts of a batch, depending on the
    longest.
    """
    for parameters in rotary_parameters(settings):
        if parameters.get("rope_type") == "longrope":
            yield int(parameters[_ORIGINAL])


def _check_rotary(settings: Any) -> None:
    """Refuses a field of the rotary embedding that is missing, or that has no effect."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = getattr(settings, "rope_parameters", None) or {}
    by_kinds = [name for name, part in found.items() if isinstance(part, dict)]
    if by_kinds and (flat := sorted(name for name, part in found.items() if name not in by_kinds and part is not None)):
        names = ", ".join(by_kinds)
        raise ValueError(f"rope_parameters: {', '.join(flat)}: has no effect beside {names}, or these have none")
    for parameters in rotary_parameters(settings):
        kind = parameters.get("rope_type", "default")
        if kind not in {"default", *ROPE_INIT_FUNCTIONS}:
            raise ValueError(f"rope_parameters: rope_type {kind!r} is not known")
        needed = _NEEDED.get(kind, set())
        if missing := sorted(name for name in needed if not parameters.get(name)):
            raise ValueError(f"rope_parameters: {missing[0]}: missing, or 0, with rope_type {kind}")
        for name in sorted({*needed, "rope_theta"} - {"short_factor", "long_factor"}):
            if (value := parameters.get(name)) is None:
                continue
            # Written so that NaN fails too.
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"rope_parameters: {name}: {value!r} is not a number above 0")
        if idle := sorted(_idle(parameters, kind, settings, nested=bool(by_kinds))):
            named = ", ".join(f"{name}: {parameters[name]!r}" for name in idle)
            raise ValueError(f"rope_parameters: {named} has no effect with rope_type {kind}; remove it")


def _idle(parameters: Mapping[str, Any], kind: str, settings: Any, *, nested: bool) -> Iterator[str]:
    """Fields that are set and that transformers does not read."""
    if parameters.get("type", kind) not in (kind, "mrope"):
        yield "type"
    known = _HARMLESS | _NEEDED.get(kind, set()) | _TAKEN.get(kind, set())
    stated = {name for name, value in parameters.items() if value is not None}
    if kind == "yarn":
        # One without the other, or beside the factor that both would give.
        scales = stated & {"mscale", "mscale_all_dim"}
        if scales and (
            "attention_factor" in stated or not (parameters.get("mscale") and parameters.get("mscale_all_dim"))
        ):
            known = known - {name for name in scales if parameters[name]}
        if nested and parameters.get("truncate") is False:
            known = known - {"truncate"}
    code = _code_of(settings)
    yield from (name for name in stated - known if f'"{name}"' not in code and not _whole(name, parameters))


def _whole(name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether it says that all numbers of a head are rotated, as they are."""
    return name == "partial_rotary_factor" and parameters[name] == 1.0


def _of_others(name: str, settings: Any) -> bool:
    """Whether the field is set, and neither the family's config nor its model knows it."""
    return bool(getattr(settings, name, None)) and not hasattr(type(settings), name) and name not in _code_of(settings)


def _code_of(settings: Any) -> str:
    """Of the model in transformers, which may read fields of its own."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING:
        # Not always of the family's own module.
        module = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)].__module__
    else:
        module = type(settings).__module__.replace(".configuration_", ".modeling_")
    return inspect.getsource(import_module(module))


def rotary_parameters(settings: Any) -> list[dict[str, Any]]:
    """The rotary parameters of the model, or of each kind of its layers."""
    found = getattr(settings, "rope_parameters", None) or {}
    nested = [part for part in found.values() if isinstance(part, dict)]
    return nested or [found]
