"""Checks whether a model and its KV cache fit before anything is loaded, and shows the arithmetic.

A refusal at start costs seconds; running out of memory in the middle of a request costs the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.checkpoint_files import weight_files
from outrider.engine.checkpoints.checkpoints import CheckpointError

_DEFAULT_CONTEXTS = 8
# Share of the memory that the weights leave free: other processes need a CPU's memory too, a GPU's is ours.
_KV_SHARE = {"cpu": 0.5, "cuda": 0.9}
_DEFAULT_CPU_BYTES = 1 << 30
# Share kept for activations and the allocator.
_RESERVE_SHARE = 0.05


class DoesNotFit(CheckpointError):
    """The model with its smallest useful KV cache does not fit into memory."""


class LinearWeights(NamedTuple):
    """Numbers of weights in a checkpoint's linear layers."""

    used: int
    """With a head that shares the embedding's weights counted as if it had its own."""
    stored: int


@dataclass(frozen=True, slots=True)
class Quantized:
    """The linear layers' weights, in fewer bits than the rest."""

    method: str
    weights: LinearWeights
    bytes_per_weight: float
    stored: bool = False
    """Whether the checkpoint has them so: they are never wider on the device."""


@dataclass(frozen=True, slots=True)
class Need:
    model: str
    parameters: int
    bytes_per_parameter: int
    dtype: str
    block_bytes: int
    """Bytes of one KV block, over all layers and heads."""
    context_blocks: int
    """KV blocks of one full context."""
    quantized: Quantized | None = None
    working_bytes: int = 0
    """What the steps of a GPU need beside the weights and the cache, at most."""

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the weights while they are read."""
        return self.weight_bytes if self.quantized and self.quantized.stored else self._plain_bytes

    @property
    def weight_bytes(self) -> int:
        if self.quantized is None:
            return self._plain_bytes
        plain = (self.parameters - self.quantized.weights.stored) * self.bytes_per_parameter
        return plain + round(self.quantized.weights.used * self.quantized.bytes_per_weight)

    @property
    def _plain_bytes(self) -> int:
        return self.parameters * self.bytes_per_parameter


def count_parameters(path: Path) -> int:
    """Elements of all tensors of a checkpoint directory, from the headers alone. 0, unknown, for GGUF and the like."""
    return sum(math.prod(shape) for _, shape in _shapes(path))


def count_linear(path: Path) -> LinearWeights:
    """Elements of the matrices other than the embedding, from the headers alone."""
    matrices = {name: math.prod(shape) for name, shape in _shapes(path) if len(shape) == 2}
    embedding = sum(size for name, size in matrices.items() if "embed" in name)
    stored = sum(matrices.values()) - embedding
    tied = not any("lm_head" in name for name in matrices)
    return LinearWeights(stored + embedding if tied else stored, stored)


def _shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    for file in weight_files(path):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_slice(name).get_shape()


def available_bytes(device: str) -> int:
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    import psutil

    return int(psutil.virtual_memory().available)


def kv_blocks(need: Need, available: int, device_type: str, *, blocks: int | None, kv_bytes: int | None) -> int:
    """KV blocks to allocate: as configured, or as many as are useful and fit. Raises DoesNotFit."""
    usable = int(available * (1 - _RESERVE_SHARE))
    if need.loaded_bytes + need.working_bytes > usable:
        raise DoesNotFit(need.model, _arithmetic(need, 0, available))
    left = usable - need.weight_bytes - need.working_bytes
    if blocks is None and kv_bytes is not None:
        blocks = kv_bytes // need.block_bytes
        if blocks < 1:
            raise CheckpointError("kv_cache_bytes", f"{kv_bytes} bytes hold no block of {need.block_bytes} bytes")
    if blocks is not None:
        if blocks * need.block_bytes > left:
            raise DoesNotFit(need.model, _arithmetic(need, blocks * need.block_bytes, available))
        return blocks
    budget = int(max(left, 0) * _KV_SHARE.get(device_type, _KV_SHARE["cuda"]))
    if device_type == "cpu":
        # Zeroing what is allocated delays a restart.
        budget = min(budget, _DEFAULT_CPU_BYTES, _DEFAULT_CONTEXTS * need.context_blocks * need.block_bytes)
    found = budget // need.block_bytes
    if found < 1:
        raise DoesNotFit(need.model, _arithmetic(need, need.block_bytes, available))
    return found


def _arithmetic(need: Need, kv: int, available: int) -> str:
    total = need.weight_bytes + need.working_bytes + kv
    weights = f"{_count(need.parameters)} parameters in {need.dtype} are {_gb(need.loaded_bytes)}"
    if (quantized := need.quantized) is not None and quantized.stored:
        in_bits = f"{_count(quantized.weights.stored)} of them in {quantized.method}"
        weights = f"{_count(need.parameters)} parameters, {in_bits}, are {_gb(need.weight_bytes)}"
    elif quantized is not None:
        weights += f" while they are read and {_gb(need.weight_bytes)} in {quantized.method}"
    if need.working_bytes:
        weights += f", steps take {_gb(need.working_bytes)}"
    return (
        f"needs {_gb(total)}: {weights}, "
        f"the KV cache is {_gb(kv)}; this device has {_gb(available)} free, of which {_RESERVE_SHARE:.0%} are kept back"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def held_bytes(holder: object) -> int:
    """Bytes of all tensors that an object holds, directly or in its parts. Each storage counts once."""
    found = {_identity(tensor): tensor for tensor in _tensors(holder, set())}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def _tensors(holder: object, seen: set[int]) -> Iterator[Tensor]:
    if id(holder) in seen or isinstance(holder, str | bytes | int | float | type | ModuleType | None):
        return
    seen.add(id(holder))
    if isinstance(holder, Tensor):
        yield from _plain(holder)
    elif isinstance(holder, Mapping):
        yield from (tensor for value in holder.values() for tensor in _tensors(value, seen))
    elif isinstance(holder, list | tuple | set):
        yield from (tensor for value in holder for tensor in _tensors(value, seen))
    else:
        names = [*getattr(holder, "__dict__", ()), *getattr(type(holder), "__slots__", ())]
        yield from (tensor for name in names for tensor in _tensors(getattr(holder, name, None), seen))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a quantized one consists of; itself if it is none."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.detach()
        return
    names, _ = tensor.__tensor_flatten__()
    parts = (getattr(tensor, name) for name in names)
    yield from (plain for part in parts if isinstance(part, Tensor) for plain in _plain(part))


def _identity(tensor: Tensor) -> int:
    # A tensor packed for oneDNN has no data pointer.
    return id(tensor) if tensor.layout is not torch.strided else tensor.data_ptr()
