"""Weight-only quantization of a loaded model's linear layers: int8, int4, fp8; by torchao, but for int8 on a CPU.

Activations, norms, the embedding and the KV cache keep the engine's dtype. A head that shares the embedding's weights
gets a quantized copy: a step reads the whole head, but only a few rows of the embedding.

On a CPU the products are those of our native kernels if they run, else torch's packed ones. Both sum a row in the same
order whatever the other rows: a token's logits have the same bits in every shape of a step, as without quantization.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.engine.checkpoints.checkpoints import CheckpointError

INT4_GROUP = 32
"""Columns of a row that share a scale and a zero in int4."""
# Rows per pack of torch's int4 kernels.
_INT4_ROWS = 16
# Compute capability of Ada, which with Hopper is the first to have fp8 products.
_FIRST_WITH_FP8 = (8, 9)

BYTES_PER_WEIGHT = {"int8": 1.0, "int4": 0.5 + 4 / INT4_GROUP, "fp8": 1.0}
"""Bytes per weight of a linear layer, including the scales of int4 groups; scales of rows are negligible."""


def check(method: str, device: str) -> None:
    """Raises CheckpointError naming `quantization` when `device` cannot run it or torchao is missing."""
    if method == "none":
        return
    kind = torch.device(device)
    if kind.type not in ("cpu", "cuda"):
        raise CheckpointError("quantization", f"{method} is not supported on {device}")
    if method == "fp8" and kind.type == "cpu":
        raise CheckpointError("quantization", "fp8 needs a GPU of compute capability 8.9 or more; on a CPU use int8")
    if method == "fp8" and torch.cuda.get_device_capability(kind) < _FIRST_WITH_FP8:
        raise CheckpointError("quantization", f"fp8 needs compute capability 8.9 or more, {device} has less; use int8")
    if method == "int8" and kind.type == "cpu":
        return
    try:
        _torchao()
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: pip install 'outrider[quantization]'"
        raise CheckpointError("quantization", message) from error


def quantize(model: nn.Module, method: str) -> None:
    """Replaces, in place, the weights of every linear layer that `method` supports. Call `check` before.

    int4 skips a layer whose number of columns is no multiple of 32, or whose number of rows is none of 16.
    """
    if method == "none":
        return
    on_cpu = next(model.parameters()).device.type == "cpu"
    if method == "int8" and on_cpu:
        _replace_linears(model)
        return
    fits = _fits_int4 if method == "int4" else _is_linear
    _torchao().quantize_(model, _config(method, on_cpu), filter_fn=fits)


def _config(method: str, on_cpu: bool) -> Any:
    library = _torchao()
    if method == "int8":
        return library.Int8WeightOnlyConfig()
    if method == "fp8":
        return library.Float8WeightOnlyConfig()
    if not on_cpu:
        return library.Int4WeightOnlyConfig(group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d")
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    # Fitting scales to the weights (Badri and Shaji 2023, half-quadratic quantization) costs seconds, once.
    return PrototypeInt4WeightOnlyConfig(group_size=INT4_GROUP, int4_choose_qparams_algorithm="hqq")


class Int8Linear(nn.Module):
    """y = x · (scale * q)ᵀ with q int8 and a scale for each row, on a CPU."""

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
        weight, scale = quantize_rows(linear.weight.detach(), linear.weight.dtype)
        return cls(weight, scale, linear.bias)

    weight: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [..., columns] → [..., rows]"""
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = torch.ops.aten._weight_int8pack_mm(flat, self.weight, self.scale.to(x.dtype))
        out = out.view(*x.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias


def quantize_rows(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[rows, columns] → int8 of the same shape and scales [rows]; w ≈ q * scale."""
    scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-8).to(scale_dtype)
    quantized = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return quantized, scale


def _replace_linears(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear.of(child))


def _is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


def _fits_int4(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    return module.in_features % INT4_GROUP == 0 and module.out_features % _INT4_ROWS == 0


def _torchao() -> Any:
    import torchao.quantization

    return torchao.quantization
