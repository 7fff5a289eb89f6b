"""Weights of 4 bits in a GGUF file (Q4_0, Q4_K): their scales and zeros, kept beside its converted checkpoint.

The checkpoint has all weights in bfloat16, which anything reads. With the grids our kernels' numbers follow from them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.engine.checkpoints.packed_weights import drop_mixed
from outrider.engine.checkpoints.quantization import Int4Linear

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

log = logging.getLogger(__name__)

_GRIDS = "int4_grids"
"""The file, in the format of safetensors: for each layer [rows, groups, 2], as in Int4Linear."""
_GROUP = 32
_WHOLE = frozenset({"F32", "F16", "BF16"})
# Of a group's largest: what rounding to bfloat16 may change, and a grid to float16, and no other grid comes near.
_TOLERANCE = 2.0**-7


def what_widens(reader: GGUFReader) -> str:
    """Says which of its matrices take more memory than in the file, which have fewer bits there; empty if none do."""
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    kinds = sorted({matrix.tensor_type.name for matrix in matrices} - _WHOLE - _KINDS.keys())
    size = 2 * sum(int(m.n_elements) for m in matrices if m.tensor_type.name in kinds)
    return f": its weights in {', '.join(kinds)} become bfloat16, {size / 1e9:.1f} GB" if kinds else ""


def write_grids(reader: GGUFReader, made: Path) -> None:
    """Of the weights in the checkpoint `made` that mean the same with them as in the file."""
    import gguf

    config = json.loads((made / "config.json").read_text())
    fours = {tensor.name: tensor for tensor in reader.tensors if tensor.tensor_type.name in _KINDS}
    arch = reader.fields["general.architecture"].contents()
    kind = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    found: dict[str, Tensor] = {}
    layers = set()
    for layer, weight in _matrices(made):
        layers.add(layer)
        stored = fours.get(f"{names.get_name(layer)}.weight")
        if stored is not None and (grid := _grid(stored, weight, config)) is not None:
            found[layer] = grid
    drop_mixed(found, layers)
    if found:
        save_file(found, made / _GRIDS)


def _matrices(made: Path) -> Iterator[tuple[str, Tensor]]:
    for part in sorted(made.glob("*.safetensors")):
        with safe_open(part, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.endswith(("_proj.weight", "lm_head.weight")):
                    yield name.removesuffix(".weight"), tensors.get_tensor(name)


def _grid(stored: ReaderTensor, weight: Tensor, config: Mapping[str, Any]) -> Tensor | None:
    """None if there is no order of the rows in which it means the weight."""
    rows = len(stored.data)
    scale, least = (torch.from_numpy(x).float().view(rows, -1) for x in _KINDS[stored.tensor_type.name](stored.data))
    # Where all numbers mean the same, it is that.
    flat = scale.half() == 0
    scale = torch.where(flat, torch.where(least.half() == 0, 1.0, -least), scale)
    for grid in _orders(torch.stack([scale, -least / scale], -1).half(), config):
        scale, zero = grid.float().unbind(-1)
        meant = (_numbers(weight, grid).view(rows, -1, _GROUP) - zero[..., None]) * scale[..., None]
        wanted = weight.float().view(meant.shape)
        if bool(((meant - wanted).abs().amax(-1) <= wanted.abs().amax(-1) * _TOLERANCE).all()):
            return grid.contiguous()
    return None


def _numbers(weight: Tensor, grid: Tensor) -> Tensor:
    """[rows, columns] from 0 to 15: those that lie nearest."""
    scale, zero = grid.float().unbind(-1)
    groups = weight.float().view(len(weight), -1, _GROUP)
    return (groups / scale[..., None] + zero[..., None]).round_().clamp_(0, 15).view(weight.shape)


def _orders(grid: Tensor, config: Mapping[str, Any]) -> Iterator[Tensor]:
    """As it is; and as transformers puts rows of queries and keys: llama.cpp rotates neighbours, it rotates halves."""
    yield grid
    for heads in (config["num_attention_heads"], config.get("num_key_value_heads")):
        if heads and len(grid) % (2 * heads) == 0:
            yield grid.view(heads, -1, 2, *grid.shape[1:]).transpose(1, 2).reshape(grid.shape)


def read(path: Path, modules: Mapping[str, nn.Module]) -> dict[str, Int4Linear]:
    """Those of a model's layers, with the checkpoint's weights, that stay in 4 bits."""
    grids = load_file(path / _GRIDS) if (path / _GRIDS).is_file() else {}
    kept = {}
    for name, grid in grids.items():
        if isinstance(linear := modules.get(name), nn.Linear):
            kept[name] = Int4Linear(_numbers(linear.weight.detach(), grid), *grid.unbind(-1))
    if kept:
        log.info("%d layers of the GGUF file are kept in int4", len(kept))
    return kept


def _q4_0(rows: Any) -> tuple[Any, Any]:
    """Scales and least weights of the groups: of 18 bytes the first two are the scale."""
    scale = _halves(rows.reshape(-1, 18)[:, :2])
    return scale, -8 * scale


def _q4_k(rows: Any) -> tuple[Any, Any]:
    """Of 144 bytes for eight groups: what 1 of a group's 6-bit scale and minimum is worth, and these."""
    from gguf.quants import Q4_K

    blocks = rows.reshape(-1, 144)
    scales, minima = Q4_K.get_scale_min(blocks[:, 4:16].copy())
    return _halves(blocks[:, :2]) * scales, -_halves(blocks[:, 2:4]) * minima


def _halves(data: Any) -> Any:
    return data.copy().view("float16").astype("float32")


_KINDS: dict[str, Callable[[Any], tuple[Any, Any]]] = {"Q4_0": _q4_0, "Q4_K": _q4_k}
