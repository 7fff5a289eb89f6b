"""Whether a model and its KV cache fit, told before anything is loaded, with the arithmetic.

A refusal at start costs seconds; running out of memory in the middle of a request costs the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from outrider.engine.checkpoints import CheckpointError

_DEFAULT_CONTEXTS = 8
# Of what the weights leave free: on a CPU the memory is other people's too, on a GPU it is there to be used.
_KV_SHARE = {"cpu": 0.5, "cuda": 0.9}
_DEFAULT_CPU_BYTES = 1 << 30
# What activations and the allocator need beside weights and KV.
_RESERVE_SHARE = 0.05


class DoesNotFit(CheckpointError):
    """The model, or its smallest useful KV cache, is larger than the memory there is."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one model asks for, of one rank of those it is divided among."""

    model: str
    parameters: int
    bytes_per_parameter: int
    dtype: str
    block_bytes: int
    """Of one KV block, over all layers; of this rank's heads."""
    context_blocks: int
    """KV blocks of one full context."""
    shards: int = 1
    """Ranks that divide the weights among themselves."""

    @property
    def weight_bytes(self) -> int:
        # Rounded up; norms, which every rank holds whole, are some millionths.
        return -(-self.parameters * self.bytes_per_parameter // self.shards)


def count_parameters(path: Path) -> int:
    """Elements of all tensors of a checkpoint directory, from the headers alone. GGUF and the like: 0, unknown."""
    total = 0
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def available_bytes(device: str) -> int:
    """Free memory of a torch device."""
    import torch

    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    import psutil

    return int(psutil.virtual_memory().available)


def kv_blocks(need: Need, available: int, device_type: str, *, blocks: int | None, kv_bytes: int | None) -> int:
    """KV blocks to allocate: those asked for, or as many as are useful and fit. Raises DoesNotFit."""
    left = int(available * (1 - _RESERVE_SHARE)) - need.weight_bytes
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
        budget = min(budget, _DEFAULT_CPU_BYTES, _DEFAULT_CONTEXTS * need.context_blocks * need.block_bytes)
    found = budget // need.block_bytes
    if found < 1:
        raise DoesNotFit(need.model, _arithmetic(need, need.block_bytes, available))
    return found


def _arithmetic(need: Need, kv: int, available: int) -> str:
    total = need.weight_bytes + kv
    share = f"a share of 1/{need.shards} of " if need.shards > 1 else ""
    weights = f"{share}{_count(need.parameters)} parameters in {need.dtype} are {_gb(need.weight_bytes)}"
    return (
        f"needs {_gb(total)}: {weights}, "
        f"the KV cache is {_gb(kv)}; this device has {_gb(available)} free, of which {_RESERVE_SHARE:.0%} are kept back"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
