"""Quantized checkpoints of the field, AWQ, GPTQ and compressed-tensors, as plain weights. Reads files; makes no model.

What a layer packs into several tensors becomes its `weight`, once, while the checkpoint is loaded. What our kernels
multiply stays as it is: rows of int8 with a scale each, on GPUs also of fp8, and on CPUs up to 4 bits in groups of a
multiple of 32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.checkpoint_files import weight_files
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.quantization import INT4_GROUP, Float8Linear, Int4Linear, Int8Linear

log = logging.getLogger(__name__)

Parts = Mapping[str, Tensor]
"""The tensors of one layer, by the end of their name."""

Kept = Int8Linear | Int4Linear | Float8Linear

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of eight outputs in a word, where each lies: AutoAWQ's kernels interleave them."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A checkpoint's tensors."""

    state: dict[str, Tensor]
    """By name, in the dtype that the engine wants."""
    kept: dict[str, Kept]
    """Layers that stay as they are, by name."""


@dataclass(frozen=True, slots=True)
class _Levels:
    """w = (number - zero) * scale"""

    numbers: Tensor
    """[outputs, inputs], from 0 on."""
    scales: Tensor
    """[outputs, groups]; so are zeros."""
    zeros: Tensor
    stated: Tensor | None = None
    """[inputs]: the group of each. Not given: they are in order."""

    def __post_init__(self) -> None:
        if self.scales.ndim != 2 or self.scales.shape != self.zeros.shape:
            raise ValueError(f"scales of {tuple(self.scales.shape)} and zeros of {tuple(self.zeros.shape)}")

    @property
    def group(self) -> Tensor:
        if self.stated is not None:
            return self.stated.long()
        inputs, groups = self.numbers.shape[1], self.scales.shape[1]
        return torch.arange(inputs) // -(-inputs // groups)

    def weight(self) -> Tensor:
        """[outputs, inputs]"""
        group = self.group
        return (self.numbers - self.zeros[:, group]) * self.scales[:, group]

    def in_int4(self) -> Int4Linear | None:
        """Nothing is lost, or it is None."""
        inputs, size = self.numbers.shape[1], self.numbers.shape[1] // self.scales.shape[1]
        in_order = torch.equal(self.group, torch.arange(inputs) // size)
        if size % INT4_GROUP or len(self.scales) != len(self.numbers) or not in_order or int(self.numbers.max()) > 15:
            return None
        exact = torch.equal(self.scales.half().float(), self.scales)
        return Int4Linear(self.numbers, self.scales, self.zeros) if exact else None


def read(path: Path, scheme: Mapping[str, Any], dtype: torch.dtype, *, keep: tuple[type[Kept], ...]) -> Plain:
    """All tensors of a checkpoint without `engine_fault`. Raises CheckpointError that names a tensor.

    keep: the kinds of layers that may stay as they are.
    """
    state: dict[str, Tensor] = {}
    kept: dict[str, Kept] = {}
    unpack = _READERS[scheme["quant_method"]]
    for layer, parts in _layers(path):
        if not _PACKED & parts.keys():
            state.update((f"{layer}.{end}", tensor) for end, tensor in parts.items())
            continue
        try:
            found = unpack(parts, scheme)
            # Row by row, as kernels read them: what was stored by columns is unpacked transposed.
            plain = (found.weight() if isinstance(found, _Levels) else found).to(dtype).contiguous()
            state[f"{layer}.weight"] = plain
            same = found.in_int4() if isinstance(found, _Levels) else _rows_of_8_bits(parts)
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(str(path), f"{layer}: its packed weights do not fit one another: {error}") from error
        if "bias" in parts:
            state[f"{layer}.bias"] = parts["bias"]
        if isinstance(same, keep):
            kept[layer] = same
    drop_mixed(kept, {name for name, _ in _layers_of(state) if name.endswith("_proj")})
    widened = f"widened to {str(dtype).removeprefix('torch.')}, and take the memory and time of plain weights"
    names = {Int8Linear: "kept in int8", Int4Linear: "kept in int4", Float8Linear: "kept in fp8"}
    kinds = sorted({names[type(layer)] for layer in kept.values()})
    log.info("weights in %s are %s", scheme["quant_method"], " and ".join(kinds) or widened)
    return Plain(state, kept)


def drop_mixed(kept: dict[str, Any], layers: set[str]) -> None:
    """The kernels join queries, keys and values to one product, and gate and up: they are of one kind, or plain."""
    kinds: dict[str, set[type]] = {}
    for name in layers:
        kinds.setdefault(_product(name), set()).add(type(kept.get(name)))
    for name in layers & kept.keys():
        if len(kinds[_product(name)]) > 1:
            del kept[name]


def _product(layer: str) -> str:
    module, _, name = layer.rpartition(".")
    return next((f"{module}.{joined}" for joined in _JOINED if name in joined), layer)


_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


_PACKED = {"qweight", "weight_packed", "weight_scale"}
"""Parts that only packed layers have."""


def _rows_of_8_bits(parts: Parts) -> Int8Linear | Float8Linear | None:
    kind = _kind_of_rows(parts)
    if kind is None:
        return None
    weight, scale = parts["weight"], parts["weight_scale"]
    return kind(weight, scale.view(-1).expand(len(weight)).clone())


def _kind_of_rows(parts: Parts) -> type[Int8Linear | Float8Linear] | None:
    """By shapes and dtypes alone."""
    weight, scale = parts.get("weight"), parts.get("weight_scale")
    if weight is None or scale is None or "weight_zero_point" in parts:
        return None
    # One scale is that of every row. Those of blocks may be as many as there are rows.
    rows = scale.numel() in (1, len(weight)) and (scale.ndim < 2 or scale.shape[1] == 1)
    return _OF_ROWS.get(weight.dtype) if rows else None


def count_rows_of_8_bits(path: Path, keep: tuple[type[Kept], ...]) -> int:
    """Weights of the layers that `read` keeps in 8 bits, from the headers alone."""
    layers: dict[str, dict[str, Tensor]] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                layer, _, end = name.rpartition(".")
                found = tensors.get_slice(name)
                dtype = _8_BITS.get(found.get_dtype(), torch.float32)
                layers.setdefault(layer, {})[end] = torch.empty(found.get_shape(), dtype=dtype, device="meta")
    kept = {layer: kind for layer, parts in layers.items() if issubclass(kind := _kind_of_rows(parts) or object, keep)}
    drop_mixed(kept, {layer for layer in layers if layer.endswith("_proj")})
    return sum(layers[layer]["weight"].numel() for layer in kept)


_OF_ROWS: dict[torch.dtype, type[Int8Linear | Float8Linear]] = {
    torch.int8: Int8Linear,
    torch.float8_e4m3fn: Float8Linear,
}
_8_BITS = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
"""By the names of safetensors."""


def _layers(path: Path) -> Iterator[tuple[str, Parts]]:
    """Each layer's tensors, wherever its files have them."""
    found: dict[str, dict[str, Path]] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                layer, _, end = name.rpartition(".")
                found.setdefault(layer, {})[end] = file
    for layer, ends in found.items():
        yield layer, {end: _tensor(file, f"{layer}.{end}") for end, file in ends.items()}


def _layers_of(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name.removesuffix(".weight"), tensor) for name, tensor in state.items() if name.endswith(".weight"))


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        found: Tensor = tensors.get_tensor(name)
    return found


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Words of 32 bits → their numbers, from the lowest bits on, next to one another along `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _gptq(parts: Parts, scheme: Mapping[str, Any]) -> _Levels:
    """Packed along the inputs, each of which names its group."""
    bits = scheme["bits"]
    numbers, scales = _unpacked(parts["qweight"], bits, 0), parts["scales"].float()
    zeros = _unpacked(parts["qzeros"], bits, 1)[:, : scales.shape[1]]
    if scheme.get("checkpoint_format", scheme.get("format")) != "gptq_v2":
        # The first version of the format stores one less.
        zeros = zeros + 1
    return _Levels(numbers.t(), scales.t(), zeros.t(), parts.get("g_idx"))


def _awq(parts: Parts, scheme: Mapping[str, Any]) -> _Levels:
    """Packed along the outputs."""
    numbers, zeros = (_ordered(_unpacked(parts[name], 4, 1)) for name in ("qweight", "qzeros"))
    return _Levels(numbers.T, parts["scales"].float().mT, zeros.T)


def _ordered(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, 8)[..., list(_AWQ_ORDER)].reshape(numbers.shape)


def _compressed(parts: Parts, scheme: Mapping[str, Any]) -> _Levels | Tensor:
    """[outputs, inputs]"""
    scales, zeros = parts["weight_scale"].float(), parts.get("weight_zero_point")
    if "weight_packed" in parts:
        outputs, inputs = parts["weight_shape"].tolist()
        bits = 32 // -(-inputs // parts["weight_packed"].shape[1])
        numbers = _unpacked(parts["weight_packed"], bits, 1)[:, :inputs]
        scales = scales if scales.ndim > 1 else scales.view(-1, 1)
        middle = torch.full_like(scales, 1 << bits - 1)
        zeros = middle if zeros is None else _unpacked(zeros, bits, 0)[:outputs]
        return _Levels(numbers, scales, zeros, parts.get("weight_g_idx"))
    weight, blocks = parts["weight"].float(), _blocks(scheme)
    if zeros is not None:
        weight = weight - _spread(zeros.float(), parts, weight, blocks)
    return weight * _spread(scales, parts, weight, blocks)


def _blocks(scheme: Mapping[str, Any]) -> Sequence[int]:
    """Rows and columns of a block, in a scheme of blocks."""
    groups = (group.get("weights") or {} for group in (scheme.get("config_groups") or {}).values())
    stated = next((found for weights in groups if (found := weights.get("block_structure"))), "1x1")
    return [int(size) for size in (stated.split("x") if isinstance(stated, str) else stated)]


def _spread(values: Tensor, parts: Parts, like: Tensor, blocks: Sequence[int]) -> Tensor:
    """A value for each weight: of the tensor, of rows, of groups of a row, or of blocks, of which the last may be cut
    off."""
    if values.ndim < 2:
        values = values.view(-1, 1)
    sizes = zip(like.shape, values.shape, blocks, strict=True)
    rows, columns = (block if -(-size // block) == count else -(-size // count) for size, count, block in sizes)
    of_row = values.repeat_interleave(rows, 0)[: len(like)]
    if "weight_g_idx" in parts:
        return of_row[:, parts["weight_g_idx"].long()]
    return of_row.repeat_interleave(columns, 1)[:, : like.shape[1]]


_READERS: dict[str, Callable[[Parts, Mapping[str, Any]], _Levels | Tensor]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}
