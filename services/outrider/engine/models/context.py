"""How many positions of a model are served, and why not more. Reads a transformers config; knows no weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from outrider.checkpoint_files import OTHER_ENGINE

log = logging.getLogger(__name__)

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def context_len(settings: Any, configured: int | None = None) -> int:
    """The least of the model's positions, the configured cap, a chunk of its attention, and the positions up to which
    its rotary embedding does not depend on the length of a text. Raises ValueError that names the field at fault."""
    positions = getattr(settings, "max_position_embeddings", None)
    if not positions:
        raise ValueError("max_position_embeddings: missing")
    limits = {"max_position_embeddings": int(positions)}
    if configured is not None:
        limits["max_context_len"] = configured
    layer_windows(settings)
    if _CHUNKED in _layer_kinds(settings):
        # Within its first chunk, an attention equals full attention.
        limits["the chunks of its attention"] = _width(settings, "attention_chunk_size", _CHUNKED)
    for limit in _rotary_limits(settings):
        limits["its rotary embedding, which changes beyond them"] = limit
    reason = min(limits, key=limits.__getitem__)
    if limits[reason] < positions:
        log.info("%d of the model's %d positions are served: %s", limits[reason], positions, reason)
    return limits[reason]


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

    Beyond them longrope has other ones, for all positions and for all texts of a batch, depending on the longest.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for parameters in rotary_parameters(settings):
        kind = parameters.get("rope_type", "default")
        if kind not in {"default", *ROPE_INIT_FUNCTIONS}:
            raise ValueError(f"rope_parameters: rope_type {kind!r} is not known")
        if kind == "longrope":
            original = parameters.get("original_max_position_embeddings")
            if not original:
                raise ValueError("rope_parameters: original_max_position_embeddings: missing")
            yield int(original)


def rotary_parameters(settings: Any) -> list[dict[str, Any]]:
    """The rotary parameters of the model, or of each kind of its layers."""
    found = getattr(settings, "rope_parameters", None) or {}
    nested = [part for part in found.values() if isinstance(part, dict)]
    return nested or [found]
