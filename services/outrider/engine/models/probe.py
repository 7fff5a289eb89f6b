"""Sees what a model asks of its attention, and whether the paged cache can give it.

One token runs through the model: on torch's meta device before any weight is read, and again once it is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from outrider.checkpoint_files import OTHER_ENGINE
from outrider.engine.models.context import layer_windows

_NAME = "outrider-probe"
_NEEDS = {"s_aux": "has attention sinks (s_aux)", "softcap": "caps scores (softcap)"}
"""What no attention here does, by the argument that asks for it."""


class _Refused(Exception):
    """The reason is its message, a sentence about the model's attention."""


@dataclass(slots=True)
class _Probe:
    """The layers that have run. `shape`: heads of keys, and their width."""

    shape: tuple[int, int]
    layers: Counter[int] = field(default_factory=Counter)
    windows: dict[int, int | None] = field(default_factory=dict)
    """Of each layer, as its mask says."""
    masks: list[tuple[Tensor, int]] = field(default_factory=list)
    """Made by transformers for this run, and what each lets a token look back at most."""

    def mask(self, size: int, device: torch.device) -> Tensor:
        mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
        self.masks.append((mask, size))
        return mask

    def see(self, layer: int, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> None:
        for name, need in _NEEDS.items():
            if arguments.get(name) is not None:
                raise _Refused(need)
        mask = arguments.get("attention_mask")
        self.windows[layer] = next((size for made, size in self.masks if made is mask), None)
        if mask is not None and self.windows[layer] is None:
            raise _Refused("computes a mask of its own")
        if (found := (key.shape[1], key.shape[3])) != self.shape or value.shape != key.shape:
            heads = f"{_heads(found)} of keys and {_heads((value.shape[1], value.shape[3]))} of values"
            raise _Refused(f"has {heads}, and the cache holds {_heads(self.shape)} of each")
        self.layers[layer] += 1

    def problem(self, settings: Any) -> str | None:
        if not self.layers:
            return "cannot be replaced by one over a paged cache"
        if self.layers != Counter(range(settings.num_hidden_layers)):
            return "does not run once in each layer"
        for layer, stated in enumerate(layer_windows(settings)):
            # Only the first chunk is served, where all is seen.
            used = self.windows[layer] if self.windows[layer] != _chunk(settings) else None
            if used != stated:
                return f"has a window of {used} positions in layer {layer}, where its config states {stated}"
        return None


def _chunk(settings: Any) -> int | None:
    return getattr(settings, "attention_chunk_size", None)


_probe: ContextVar[_Probe] = ContextVar("outrider_probe")


def attention_problem(model: PreTrainedModel, shape: tuple[int, int]) -> str | None:
    """Why the model cannot run over a cache of `shape` (heads of keys, their width); None when there is no reason.

    None also of a model that cannot run on the meta device: what is wrong shows once it is loaded.
    """
    probe = _Probe(shape)
    try:
        with _watched(model, probe):
            _run(model)
        reason = probe.problem(model.config.get_text_config())
    except _Refused as refused:
        reason = str(refused)
    except Exception as error:  # models fail in many ways
        if model.device.type == "meta":
            return None
        reason = f"cannot run: {error}"
    return reason and f"its attention {reason}; {OTHER_ENGINE}"


def on_meta(config: Any) -> PreTrainedModel | None:
    """The model of this config without weights; None if it cannot be made so."""
    try:
        with torch.device("meta"):
            made: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=_register())
    except Exception:  # what is wrong is said where the weights are read
        return None
    return made.eval()


@torch.inference_mode()
def _run(model: PreTrainedModel) -> None:
    first = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    # With a cache transformers does not ask the positions whether texts are packed: on meta they have no values.
    model(input_ids=first, position_ids=first, use_cache=True)


@contextmanager
def _watched(model: PreTrainedModel, probe: _Probe) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(_register())
    token = _probe.set(probe)
    try:
        yield
    finally:
        _probe.reset(token)
        model.set_attn_implementation(before)


def _heads(shape: tuple[int, int]) -> str:
    return f"{shape[0]} heads x {shape[1]}"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **more: Any
) -> tuple[Tensor, None]:
    """transformers' attention function."""
    if mask:
        more["attention_mask"] = mask[0]
    if not hasattr(module, "layer_idx"):
        raise _Refused("has layers without a number")
    _probe.get().see(int(module.layer_idx), key, value, more)  # type: ignore[arg-type]
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _mask(*_: Any, device: torch.device, local_size: int | None = None, **__: Any) -> Tensor | None:
    """transformers' mask function: none where all is seen."""
    return None if local_size is None else _probe.get().mask(local_size, device)


def _register() -> str:
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
    return _NAME
