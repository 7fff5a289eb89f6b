"""DFlash heads, as their authors and speculators publish them; what ours do not do is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.heads.dflash import DFlashHead
from outrider.heads.formats.format import HeadFormat, OurHead, architectures, register, unserved
from outrider.heads.interface import BlockShape, HeadError, TargetParts
from outrider.heads.tensors import counted_settings, fill, read_tensors, take_token_map

_MASK_FILE = "mask_embedding.pt"
_USUAL: dict[str, Any] = {
    "speculators_model_type": "dflash",
    "is_neox_style": True,
    "logit_scale": 1,
    "use_aux_hidden_state": True,
}
_UNSERVED = (
    *("use_swa", "causal", "attention_sink_bias", "attention_value_scale", "sample_from_anchor"),
    *("projector_type", "shift_label"),
)


def _knows(config: dict[str, Any], path: Path) -> bool:
    return "dflash_config" in config or "dflash" in architectures(config)


def _name(name: str) -> str | None:
    """None for a copy of the target's own."""
    return None if name.startswith("verifier_") or name.endswith("inv_freq") else name.removeprefix("model.")


def _load(path: Path, config: dict[str, Any], target: TargetParts) -> DFlashHead:
    file, own = f"{path}/config.json", config.get("dflash_config") or {}
    for field, value in _unserved(config, own):
        raise HeadError(file, f"{field} {value}: not served in DFlash heads")
    if (path / _MASK_FILE).exists():
        raise HeadError(f"{path}/{_MASK_FILE}", "an embedding of its own for masks is not served")
    tensors = read_tensors(path, _name)
    vocab = len(target.embedding)
    token_map = take_token_map(tensors, vocab)
    head = DFlashHead(
        counted_settings(path, config, tensors),
        target,
        _taps(file, config, own, target),
        _block(file, config, own, vocab),
        token_map=token_map,
        own_embedding="embed_tokens.weight" in tensors,
    )
    _check(file, config, head, target, tensors)
    tensors.setdefault("embed_tokens.weight", target.embedding)
    if token_map is None:
        tensors.setdefault("lm_head.weight", target.head)
    fill(head, tensors)
    return head


def _unserved(config: dict[str, Any], own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of heads that compute something else."""
    for name in ("use_sliding_window", "is_causal", "add_swa_attention_sink_bias", "sample_from_anchor"):
        if config.get(name):
            yield name, config[name]
    for name in _UNSERVED:
        if own.get(name):
            yield f"dflash_config.{name}", own[name]
    yield from unserved(config, own, **_USUAL)


def _taps(file: str, config: dict[str, Any], own: dict[str, Any], target: TargetParts) -> tuple[int, ...]:
    """Its authors name the layers whose outputs are read, speculators those whose inputs are."""
    if inputs := config.get("aux_hidden_state_layer_ids"):
        name, taps = "aux_hidden_state_layer_ids", tuple(inputs)
    else:
        stated = own.get("target_layer_ids") or _usual_layers(config)
        name, taps = "dflash_config.target_layer_ids", tuple(layer + 1 for layer in stated)
    if not taps:
        raise HeadError(file, f"{name}: missing")
    if any(not 0 <= tap < target.layers for tap in taps):
        # After the last layer some read the state before the last norm, some that after it.
        raise HeadError(file, f"{name}: reads the inputs of layers {taps}, and the target has {target.layers}")
    return taps


def _usual_layers(config: dict[str, Any]) -> list[int]:
    """As its authors' code has them: spread from the second layer of the target to the third last."""
    of, count = config.get("num_target_layers"), int(config.get("num_hidden_layers", 1))
    if not of or count == 1:
        return [of // 2] if of else []
    return [round(1 + number * (of - 4) / (count - 1)) for number in range(count)]


def _block(file: str, config: dict[str, Any], own: dict[str, Any], vocab: int) -> BlockShape:
    def stated(name: str, least: int, most: int) -> int:
        value = own.get(name, config.get(name))
        if not isinstance(value, int) or not least <= value <= most:
            raise HeadError(file, f"{name} {value}: must be from {least} to {most}")
        return value

    return BlockShape(stated("block_size", 2, 256), stated("mask_token_id", 0, vocab - 1))


def _check(
    file: str, config: dict[str, Any], head: DFlashHead, target: TargetParts, tensors: dict[str, Tensor]
) -> None:
    width, theirs = head.settings.width, int(config.get("target_hidden_size") or target.width)
    if theirs != target.width:
        raise HeadError(file, f"target_hidden_size {theirs}, the target's is {target.width}")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in tensors and width != target.width:
            raise HeadError(name, f"missing, and the target's has the width {target.width}, not {width}")
    if (vocab := int(config.get("vocab_size") or len(target.embedding))) != len(target.embedding):
        raise HeadError(file, f"vocab_size {vocab}, the target's is {len(target.embedding)}")


def _build(ours: OurHead, target: TargetParts) -> DFlashHead:
    raise HeadError(f"{ours.path}/config.json", "outrider_head.kind dflash: no such head is trained here")


register(HeadFormat("dflash", _knows, _load, _build))
