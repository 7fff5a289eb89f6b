"""EAGLE-3 heads: known by their tensors, whatever architecture they are published under."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from outrider.heads.eagle import Eagle3Head, EagleVariant, default_taps
from outrider.heads.formats.format import HeadFormat, OurHead, architectures, register, unserved
from outrider.heads.interface import HeadError, TargetParts
from outrider.heads.tensors import counted_settings, fill, read_tensors, settings_of, take_token_map, tensor_names

_IDS = "eagle_aux_hidden_state_layer_ids"
_USUAL: dict[str, Any] = {"speculators_model_type": "eagle3", "use_aux_hidden_state": True, "logit_scale": 1}
_EAGLE_LAYER = re.compile(r"(midlayer|layers|additional_layers)\.(?:(\d+)\.)?")


def _knows(config: dict[str, Any], path: Path) -> bool:
    return "eagle3" in architectures(config) or _is_eagle(tensor_names(path))


def _is_eagle(names: Collection[str]) -> bool:
    ours = set(filter(None, map(_eagle_name, names)))
    return {"fc.weight", "layers.0.hidden_norm.weight"} <= ours


def _eagle_name(name: str) -> str | None:
    """A tensor's name among those of vLLM's module; None for a copy of the target's own."""
    name = re.sub(r"^(model|draft_model|eagle_module)\.", "", name)
    if layer := _EAGLE_LAYER.match(name):
        # SGLang counts the layers after the first apart.
        number = int(layer[2] or 0) + (layer[1] == "additional_layers")
        name = f"layers.{number}.{name[layer.end() :]}"
    return None if name.startswith("verifier_") or name.endswith("inv_freq") else name


def _eagle_tensors(path: Path) -> dict[str, Tensor]:
    tensors = read_tensors(path, _eagle_name)
    for name in [name for name in tensors if name.endswith(".hidden_norm.weight") and not name.startswith("layers.0.")]:
        # After the first layer only the state is read: SGLang's layers have one norm, under this name.
        tensors.setdefault(name.replace("hidden_norm", "input_layernorm"), tensors.pop(name))
    return tensors


def _load_eagle(path: Path, config: dict[str, Any], target: TargetParts) -> Eagle3Head:
    tensors, inner = _eagle_tensors(path), config.get("eagle_config") or {}
    vocab = len(target.embedding)
    token_map = take_token_map(tensors, vocab)
    settings = counted_settings(path, config, tensors)
    for field, value in unserved(config, inner, settings.layers, **_USUAL):
        raise HeadError(f"{path}/config.json", f"{field} {value}: not served in EAGLE-3 heads")
    taps, other_taps = _taps(config, inner, target.layers)
    variant = EagleVariant(
        taps=taps,
        target_width=int(config.get("target_hidden_size") or target.width),
        logits_width=vocab if token_map is None else len(token_map),
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(inner.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
        own_embedding="embed_tokens.weight" in tensors,
    )
    _check_eagle(path, variant, settings.width, target)
    head = Eagle3Head(settings, variant, target, token_map)
    head.other_taps = other_taps
    if token_map is None:
        tied = tensors.get("embed_tokens.weight") if config.get("tie_word_embeddings") else None
        tensors.setdefault("lm_head.weight", target.head if tied is None else tied)
    tensors.setdefault("embed_tokens.weight", target.embedding)
    fill(head, tensors)
    return head


def _taps(config: dict[str, Any], inner: dict[str, Any], layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers whose inputs are read, and those that the field may mean as well.

    vLLM names the layers whose inputs are read, SpecForge those whose outputs are: of these the first is 1, as SGLang
    tells them apart."""
    stated = inner.get(_IDS) or config.get(_IDS)
    if not stated:
        return default_taps(layers), ()
    inputs, outputs = tuple(stated), tuple(tap + 1 for tap in stated)
    if max(outputs) > layers:
        return inputs, ()
    return (outputs, inputs) if inputs[0] == 1 else (inputs, outputs)


def _check_eagle(path: Path, variant: EagleVariant, width: int, target: TargetParts) -> None:
    file = f"{path}/config.json"
    if variant.target_width != target.width:
        raise HeadError(file, f"target_hidden_size {variant.target_width}, the target's is {target.width}")
    if not variant.own_embedding and width != target.width:
        raise HeadError("embed_tokens.weight", f"missing, and the target's has the width {target.width}, not {width}")
    if any(not 0 <= tap <= target.layers for tap in variant.taps):
        raise HeadError(file, f"{_IDS} {variant.taps}: the target has {target.layers} layers")


def _build(ours: OurHead, target: TargetParts) -> Eagle3Head:
    rows = target.head if ours.token_map is None else target.head[ours.token_map]
    variant = EagleVariant(ours.taps, target.width, len(rows), fc_norm="fc_norm.0.weight" in ours.tensors)
    head = Eagle3Head(settings_of(ours.config, ours.path, ours=True), variant, target, ours.token_map)
    head.lm_head.weight = nn.Parameter(rows)
    return head


register(HeadFormat("eagle3", _knows, _load_eagle, _build))
