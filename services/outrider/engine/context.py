"""How many positions of a model are served, and why not more. Reads a transformers config; knows no weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The field that has the width, by the kind of a layer."""


def context_len(settings: Any, configured: int | None = None) -> int:
    """The least of the model's positions, the configured cap, the windows of its layers, and the positions up to which
    its rotary embedding does not depend on the length of a text. Raises ValueError that names the field at fault."""
    positions = getattr(settings, "max_position_embeddings", None)
    if not positions:
        raise ValueError("max_position_embeddings: missing")
    limits = {"max_position_embeddings": int(positions)}
    if configured is not None:
        limits["max_context_len"] = configured
    if windows := [window for window in layer_windows(settings) if window is not None]:
        # Within its window, an attention equals full attention.
        limits["the window of its attention"] = min(windows)
    for limit in _rotary_limits(settings):
        limits["its rotary embedding, which changes beyond them"] = limit
    reason = min(limits, key=limits.__getitem__)
    if limits[reason] < positions:
        log.info("%d of the model's %d positions are served: %s", limits[reason], positions, reason)
    return limits[reason]


def layer_windows(settings: Any) -> tuple[int | None, ...]:
    """Of each layer, how many positions it looks back at most, its own included; None: all. Raises ValueError."""
    kinds = getattr(settings, "layer_types", None)
    if kinds is None:
        # transformers' models without kinds of layers give all layers the window. Qwen's configs name one and turn it
        # off.
        used = getattr(settings, "use_sliding_window", True) is not False
        widths = [
            _width(each, width) for each in _WINDOWS.values() if used and (width := getattr(settings, each, None))
        ]
        return (min(widths, default=None),) * int(settings.num_hidden_layers)
    if unknown := sorted(set(kinds) - {"full_attention", *_WINDOWS}):
        raise ValueError(f"layer_types: layers of kind {', '.join(unknown)} are no attention over keys and values")
    return tuple(_window(settings, kind) for kind in kinds)


def _window(settings: Any, kind: str) -> int | None:
    if kind == "full_attention":
        return None
    field = _WINDOWS[kind]
    if not (width := getattr(settings, field, None)):
        raise ValueError(f"{field}: missing, though layer_types has {kind}")
    return _width(field, width)


def _width(field: str, width: Any) -> int:
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
