"""Medusa heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.heads.formats.format import HeadFormat, OurHead, architectures, register, unserved
from outrider.heads.interface import HeadError, TargetParts
from outrider.heads.medusa import MedusaHead
from outrider.heads.tensors import ascending, fill, read_tensors


def _knows(config: dict[str, Any], path: Path) -> bool:
    named = "medusa" in architectures(config) or config.get("model_type") == "medusa"
    return named or "medusa_num_heads" in config


def _load_medusa(path: Path, config: dict[str, Any], target: TargetParts) -> MedusaHead:
    def rename(name: str) -> str:
        name = name.removeprefix("medusa_heads.")
        block, _, rest = name.partition(".")
        if not block.isdigit():
            return name
        layer, _, kind = rest.partition(".")
        return f"blocks.{block}.layers.{layer}.{kind.removeprefix('linear.')}" if "linear" in kind else name

    for field, value in unserved(config, {}, logit_scale=1):
        raise HeadError(f"{path}/config.json", f"{field} {value}: not served in Medusa heads")
    tensors = read_tensors(path, rename)
    blocks = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    layers = {name.split(".")[3] for name in tensors if name.startswith("blocks.0.")}
    if not blocks or not layers:
        raise HeadError("blocks.0.layers.0.weight", "missing")
    for number in range(len(blocks)):
        # The first code's files have the vocabulary head as one more layer of a block.
        if (old := tensors.pop(f"{number}.{len(layers)}.weight", None)) is not None:
            tensors[f"lm_heads.{number}.weight"] = old
    if "lm_head.weight" in tensors:
        tensors.setdefault("lm_heads.0.weight", tensors.pop("lm_head.weight"))
    token_map = tensors.pop("token_map", None)
    if token_map is not None:
        token_map, order = ascending("token_map", token_map, len(target.embedding))
        for name in [name for name in tensors if name.startswith("lm_heads.")]:
            # As in vLLM a file may have rows of the other tokens too.
            rows = tensors[name]
            tensors[name] = rows[order if len(rows) == len(order) else token_map]
    own_heads = "lm_heads.1.weight" in tensors
    head = MedusaHead(
        target,
        len(blocks),
        layers=len(layers),
        bias="blocks.0.layers.0.bias" in tensors,
        token_map=token_map,
        own_heads=own_heads,
    )
    if not own_heads:
        tensors.setdefault("lm_heads.0.weight", head.lm_heads[0].weight.data)  # type: ignore[arg-type]
    fill(head, tensors)
    return head


def _build(ours: OurHead, target: TargetParts) -> MedusaHead:
    blocks = {name.split(".")[1] for name in ours.tensors if name.startswith("blocks.")}
    return MedusaHead(target, len(blocks), token_map=ours.token_map)


register(HeadFormat("medusa", _knows, _load_medusa, _build))
