"""Matrix products of a model on a GPU, with the norm before them, and the gate or the addition after.

By our kernel a row has the same bits alone and in any batch; by torch's products, which choose an algorithm by the
number of rows, it may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_ROWS = 128
_SHAPES = {16: (4, 8), 32: (4, 6), 64: (4, 4), _MAX_ROWS: (8, 3)}
"""By rows of a tile: its warps, and the blocks of columns that it has on their way from memory."""
# As many bytes on their way as of weights in 16 bits. More warps would each widen weights that others widen too.
_SHAPES_8_BITS = {16: (2, 12), 32: (2, 9), 64: (4, 5), _MAX_ROWS: (8, 2)}


@dataclass(frozen=True, slots=True)
class Product:
    """Linear modules of the same inputs as one, after an RMS norm if there is one."""

    weight: Tensor
    bias: Tensor | None
    norm: Tensor | None
    scales: Tensor | None = None
    """float32 [outputs], of weights in 8 bits."""

    @classmethod
    def of(cls, *linears: Any, norm: Tensor | None = None) -> Product:
        """Frees the modules' weights where they are copied: the model may fill more than half the memory."""
        biased = [linear.bias.detach() for linear in linears if linear.bias is not None]
        bias = torch.cat(biased) if biased else None
        scaled = [linear.scale.float() for linear in linears if hasattr(linear, "scale")]
        scales = torch.cat(scaled) if scaled else None
        if len(linears) == 1:
            return cls(linears[0].weight.detach(), bias, norm, scales)
        # As bytes: not every torch joins fp8 on GPUs.
        dtype = linears[0].weight.dtype
        joined = torch.cat([linear.weight.detach().view(torch.uint8) for linear in linears]).view(dtype)
        for linear in linears:
            linear.weight = None
        return cls(joined, bias, norm, scales)


@dataclass(frozen=True, slots=True)
class Products:
    kernels: ModuleType
    eps: float
    invariant: bool
    """Whether products of plain weights are ours. Those of float32, which nobody serves, are torch's."""

    @classmethod
    def of(cls, eps: float, dtype: torch.dtype, *, invariant: bool) -> Products:
        # Imported here: an engine on a CPU needs no Triton.
        from outrider.engine.models import llama_kernels

        return cls(llama_kernels, eps, invariant and dtype != torch.float32)

    def __call__(
        self,
        x: Tensor,
        by: Product,
        *,
        gate: bool = False,
        add_to: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """[rows, width]. gate: silu of its first half times its second. add_to: returned with the product added. out:
        of any dtype, returned with the product, which is rounded to x's."""
        if self.invariant or by.scales is not None:
            if out is None:
                out = x.new_empty(x.shape[0], by.weight.shape[0] // (1 + gate)) if add_to is None else add_to
            return self._launch(x, by, out, gate=gate, add=add_to is not None)
        found = F.linear(x if by.norm is None else self.norm(x, by.norm), by.weight, by.bias)
        if gate:
            opened, up = found.chunk(2, dim=-1)
            found = F.silu(opened) * up
        if add_to is not None:
            return add_to.add_(found)
        return found if out is None else out.copy_(found)

    def _launch(self, x: Tensor, by: Product, out: Tensor, *, gate: bool, add: bool) -> Tensor:
        rows, width = out.shape
        tile = min(max(16, 1 << (rows - 1).bit_length()), _MAX_ROWS)
        block = min(max(32, tile), 64 if gate else _MAX_ROWS)
        warps, stages = _SHAPES[tile] if by.scales is None else _SHAPES_8_BITS[tile]
        self.kernels.product_kernel[(-(-rows // tile), -(-width // block))](
            x,
            x if by.norm is None else by.norm,
            by.weight,
            x if by.scales is None else by.scales,
            x if by.bias is None else by.bias,
            out,
            rows,
            self.eps,
            x.shape[1],
            width,
            NORM=by.norm is not None,
            SCALED=by.scales is not None,
            BIAS=by.bias is not None,
            GATE=gate,
            ADD=add,
            WIDEN=x.device.type == "cpu",
            ROWS=tile,
            BLOCK_N=block,
            num_warps=warps,
            num_stages=stages,
        )
        return out

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm, [tokens, width]."""
        out = torch.empty_like(x)
        tokens, width = x.shape
        self.kernels.norm_kernel[(tokens,)](
            x,
            weight,
            out,
            self.eps,
            WIDTH=width,
            PADDED=1 << (width - 1).bit_length(),
            num_warps=8 if width > 1024 else 4,
        )
        return out
