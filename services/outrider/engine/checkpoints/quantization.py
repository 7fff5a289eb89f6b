"""Weight-only quantization of a loaded model's linear layers: int8, int4, fp8; int4 on GPUs by torchao.

Norms, the embedding, the KV cache and activations keep the engine's dtype, but our native kernels round the activations
that they multiply with int4 to 8 bits. A head that shares the embedding's weights
gets a quantized copy: a step reads the whole head, but only a few rows of the embedding.

On a CPU the products are those of our native kernels if they run, else torch's packed ones. Both sum a row in the same
order whatever the other rows: a token's logits have the same bits in every shape of a step, as without quantization.
On a GPU so do the fused products, which read 8 bits as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.checkpoints.checkpoints import CheckpointError

INT4_GROUP = 32
"""Columns of a row that share a scale and a zero in int4."""
# Rows per pack of torch's int4 kernels.
_INT4_ROWS = 16
# Each time the nearest numbers are taken and the grid is fitted to them. Further times change little.
_GRID_FITS = 3
_FITTED_WEIGHTS = 1 << 18
# Of float16: its numbers below have fewer bits.
_MIN_SCALE = 2.0**-14
# Far from those of weights that have both signs.
_LARGEST_ZERO = 64
_LARGEST_FP8 = 448.0
# In float32, beside a model that may fill the card: a vocabulary's head would take some GB.
_ROWS_AT_ONCE = 8192
# Compute capability of Ada, which with Hopper is the first to read fp8.
_FIRST_WITH_FP8 = (8, 9)

BYTES_PER_WEIGHT = {"int8": 1.0, "int4": 0.5 + 4 / INT4_GROUP, "fp8": 1.0}
"""Bytes per weight of a linear layer, including the scales and zeros of int4 groups; scales of rows are negligible."""


def check(method: str, device: str) -> None:
    """Raises CheckpointError naming `quantization` when `device` cannot run it or torchao is missing."""
    if method == "none":
        return
    kind = torch.device(device)
    if kind.type not in ("cpu", "cuda"):
        raise CheckpointError("quantization", f"{method} is not supported on {device}")
    if method == "fp8" and kind.type == "cpu":
        raise CheckpointError("quantization", "fp8 needs a GPU of compute capability 8.9 or more; on a CPU use int8")
    if method == "fp8" and not reads_fp8(kind):
        raise CheckpointError("quantization", f"fp8 needs compute capability 8.9 or more, {device} has less; use int8")
    if kind.type == "cpu" or method != "int4":
        return
    try:
        _torchao()
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: pip install 'outrider[quantization]'"
        raise CheckpointError("quantization", message) from error


def reads_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


def quantize(model: nn.Module, method: str) -> None:
    """Replaces, in place, the weights of every linear layer that `method` supports. Call `check` before.

    int4 skips a layer whose number of columns is no multiple of 32, or whose number of rows is none of 16.
    """
    if method == "none":
        return
    if method != "int4":
        _replace_linears(model, Int8Linear if method == "int8" else Float8Linear, _is_linear)
    elif next(model.parameters()).device.type == "cpu":
        _replace_linears(model, Int4Linear, _fits_int4)
    else:
        config = _torchao().Int4WeightOnlyConfig(group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d")
        _torchao().quantize_(model, config, filter_fn=_fits_int4)


class Int8Linear(nn.Module):
    """y = x · (scale * q)ᵀ with q int8 and a scale for each row."""

    rounds_inputs = False
    """Whether native kernels may round each x to 8 bits too: it halves the time, and is good enough for a draft."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        """weight [rows, columns] int8; scale [rows]; bias [rows]."""
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """The quantized layer nearest to `linear`."""
        # The scale is rounded to the layer's dtype before it quantizes: torch's kernel takes scales in the activations'
        # dtype, and rounding a scale afterwards would shift a whole row.
        parts = [
            quantize_rows(rows, linear.weight.dtype) for rows in torch.split(linear.weight.detach(), _ROWS_AT_ONCE)
        ]
        weight, scale = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(weight, scale, linear.bias)

    weight: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [..., columns] → [..., rows]"""
        if x.device.type != "cpu":
            return _widened(x, self.weight, self.scale, self.bias)
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = torch.ops.aten._weight_int8pack_mm(flat, self.weight, self.scale.to(x.dtype))
        out = out.view(*x.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias


class Float8Linear(nn.Module):
    """y = x · (scale * q)ᵀ with q in e4m3 and a scale for each row, on a GPU."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        """weight [rows, columns] float8_e4m3fn; scale [rows], kept in float32; bias [rows]."""
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.float())
        self.bias = bias

    @classmethod
    def of(cls, linear: nn.Linear) -> Float8Linear:
        """The quantized layer nearest to `linear`."""
        parts = [_in_float8(rows.float()) for rows in torch.split(linear.weight.detach(), _ROWS_AT_ONCE)]
        weight, scale = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(weight.view(torch.float8_e4m3fn), scale, linear.bias)

    weight: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [..., columns] → [..., rows]"""
        return _widened(x, self.weight, self.scale, self.bias)


def _in_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As bytes: not every torch joins fp8 on GPUs."""
    scale = (weight.abs().amax(1) / _LARGEST_FP8).clamp_min(1e-12)
    # What is above the largest number by rounding would be none.
    steps = (weight / scale[:, None]).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    return steps.to(torch.float8_e4m3fn).view(torch.uint8), scale


def _widened(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """By torch, which widens the weights for each product: where our kernels do not run the model."""
    return F.linear(x, (weight.float() * scale[:, None]).to(x.dtype), bias)


def quantize_rows(
    weight: Tensor, scale_dtype: torch.dtype, noise: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """[rows, columns] → int8 of the same shape and scales [rows]; w ≈ q * scale. With noise a weight is rounded up as
    often as it is near the number above, so that a sum of many is right in the mean."""
    scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-8).to(scale_dtype)
    steps = weight.float() / scale.float()[:, None]
    rounded = steps.round() if noise is None else (steps + torch.rand(steps.shape, generator=noise)).floor()
    return rounded.clamp(-127, 127).to(torch.int8), scale


class Int4Linear(nn.Module):
    """y = x · (scale * (q - zero))ᵀ with q from 0 to 15, and a scale and a zero for each group of a row's columns, on a
    CPU."""

    def __init__(self, numbers: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> None:
        """numbers [rows, columns], of any integers; scale, zero [rows, groups], kept in float16; bias [rows]."""
        super().__init__()
        numbers = numbers.to(torch.uint8)
        self.register_buffer("weight", numbers[:, ::2] | numbers[:, 1::2] << 4)
        self.register_buffer("grid", torch.stack([scale.half(), zero.half()], -1))
        self.group = numbers.shape[1] // scale.shape[1]
        self.bias = bias

    @classmethod
    def of(cls, linear: nn.Linear) -> Int4Linear:
        """A quantized layer near to `linear`."""
        return cls(*quantize_groups(linear.weight.detach(), INT4_GROUP), linear.bias)

    weight: Tensor
    """[rows, columns / 2]: of two numbers in a byte the first has the lower bits."""
    grid: Tensor
    """[rows, groups, 2] float16: scales and zeros."""
    _packed: Tensor | None = None
    """The weights in the order of torch's kernel, instead of `weight` from the first product on."""

    def numbers(self) -> Tensor:
        """[rows, columns]"""
        return torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1)

    def grids(self, group: int) -> Tensor:
        """[rows, columns / group, 2] for a group that divides its own."""
        return self.grid.repeat_interleave(self.group // group, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., columns] → [..., rows], by torch. Its kernel rounds scales and offsets to the dtype of x."""
        if self._packed is None:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(self.numbers().int(), 1)
            self.weight = self.weight[:, :0]
        scale, zero = self.grid.float().unbind(-1)
        # Its numbers are from -8 to 7, and it adds an offset.
        grid = torch.stack([scale, (8 - zero) * scale], -1).transpose(0, 1).to(x.dtype).contiguous()
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self._packed, self.group, grid)
        out = out.view(*x.shape[:-1], len(self.grid))
        return out if self.bias is None else out + self.bias


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, columns] → numbers from 0 to 15 of the same shape, scales and zeros [rows, columns / group];
    w ≈ (q - zero) * scale: rounded to nearest on a grid of least squares."""
    # A few rows at a time, which the CPU's caches hold.
    count = max(1, _FITTED_WEIGHTS // weight.shape[1])
    parts = [_on_grids(weight[first : first + count], group) for first in range(0, len(weight), count)]
    numbers, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    return numbers, scale, zero


def _on_grids(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    # Sums over the first of the dimensions are quicker.
    w = weight.float().view(len(weight), -1, group).permute(2, 0, 1).contiguous()
    mean, least = w.mean(0), w.amin(0).clamp_max(0)
    scale = ((w.amax(0).clamp_min(0) - least) / 15).clamp_min(_MIN_SCALE)
    zero = -least / scale
    q = _nearest(w, scale, zero)
    for _ in range(_GRID_FITS):
        centred = q - q.mean(0)
        spread = centred.square().sum(0)
        scale = torch.where(spread > 0, (centred * w).sum(0) / spread, scale)
        # As they are kept: rounding them afterwards would shift a whole group.
        scale = scale.clamp_min(_MIN_SCALE).half().float()
        zero = (q.mean(0) - mean / scale).clamp(-_LARGEST_ZERO, _LARGEST_ZERO).half().float()
        q = _nearest(w, scale, zero)
    return q.permute(1, 2, 0).reshape(weight.shape).to(torch.uint8), scale, zero


def _nearest(w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (w / scale + zero).round().clamp(0, 15)


def _replace_linears(
    model: nn.Module, kind: type[Int8Linear | Int4Linear | Float8Linear], fits: Callable[[nn.Module, str], bool]
) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and fits(child, name):
                setattr(parent, name, kind.of(child))


def _is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


def _fits_int4(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    return module.in_features % INT4_GROUP == 0 and module.out_features % _INT4_ROWS == 0


def _torchao() -> Any:
    import torchao.quantization

    return torchao.quantization
