"""Matrix products as GPUs compute them, in Triton's interpreter: the same bits in any number of rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from outrider.engine.checkpoints.quantization import Float8Linear, Int8Linear
from outrider.engine.models.products import Product, Products
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("interpreted")

EPS = 1e-5
# In, out: widths that no tile divides, and parts of SmolLM2's and Llama 8B's.
CASES = [
    *(((200, 41), kind) for kind in ("plain", "norm, bias", "norm, gate", "norm, bias, gate", "add", "bias, add")),
    *((shape, kind) for shape in ((576, 48), (4096, 40)) for kind in ("norm, bias", "norm, gate")),
    *((shape, "add") for shape in ((1536, 64), (14336, 32))),
]
# Wider ones take more turns of the same loop.
_MAX_QUICK = 2048


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(width: int, out: int, dtype: torch.dtype, *, norm: bool, biased: bool) -> Product:
    weight = drawn(out, width, dtype=dtype, seed=1) / math.sqrt(width)
    bias = drawn(out, dtype=dtype, seed=2) if biased else None
    return Product(weight, bias, normed(width, dtype) if norm else None)


def normed(width: int, dtype: torch.dtype) -> Tensor:
    return 1 + drawn(width, dtype=dtype, seed=3) / 8


def product_of_8_bits(
    kind: type[Float8Linear | Int8Linear], width: int, out: int, dtype: torch.dtype, *, norm: bool, biased: bool
) -> Product:
    linears = []
    for rows in (out // 2, out - out // 2):
        linear = nn.Linear(width, rows, bias=biased, dtype=dtype)
        linear.weight = nn.Parameter(drawn(rows, width, dtype=dtype, seed=rows) / math.sqrt(width))
        # Rows of another size: each has its own scale.
        linear.weight.data[::3] *= 5
        linears.append(kind.of(linear.requires_grad_(False)))
    return Product.of(*linears, norm=normed(width, dtype) if norm else None)


def exact(x: Tensor, by: Product, *, gate: bool, add_to: Tensor | None) -> Tensor:
    """In float64, rounded nowhere."""
    wide = x.double()
    if by.norm is not None:
        wide = F.rms_norm(wide, (x.shape[1],), by.norm.double(), EPS)
    weight = by.weight.double() if by.scales is None else by.weight.double() * by.scales.double()[:, None]
    found = F.linear(wide, weight, None if by.bias is None else by.bias.double())
    if gate:
        opened, up = found.chunk(2, -1)
        found = F.silu(opened) * up
    return found if add_to is None else found + add_to


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("shape", "kind"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0][0] > _MAX_QUICK else ()) for case in CASES],
    ids=str,
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_is_right(
    shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    width, out = shape
    by = product(width, 2 * out if "gate" in kind else out, dtype, norm="norm" in kind, biased="bias" in kind)
    has_the_same_bits_alone_and_in_any_batch_and_is_right(by, out, kind, dtype)


@pytest.mark.parametrize("weights", [Float8Linear, pytest.param(Int8Linear, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(("shape", "kind"), [((200, 42), kind) for kind in ("norm, bias", "norm, bias, gate", "add")])
def test_so_has_one_by_weights_of_8_bits(
    shape: tuple[int, int], kind: str, dtype: torch.dtype, weights: type[Float8Linear | Int8Linear]
) -> None:
    width, out = shape
    wide = 2 * out if "gate" in kind else out
    by = product_of_8_bits(weights, width, wide, dtype, norm="norm" in kind, biased="bias" in kind)
    assert by.weight.element_size() == 1
    has_the_same_bits_alone_and_in_any_batch_and_is_right(by, out, kind, dtype)


def has_the_same_bits_alone_and_in_any_batch_and_is_right(by: Product, out: int, kind: str, dtype: torch.dtype) -> None:
    width, gate, add = by.weight.shape[1], "gate" in kind, "add" in kind
    multiply = Products.of(EPS, dtype, invariant=True)
    # More than two tiles of the largest size would only repeat it.
    count = 130 if width < 500 else 33
    x, before = drawn(count, width, dtype=dtype, seed=4), drawn(count, out, dtype=dtype, seed=5)
    x[1::2] *= 30

    def run(rows: slice) -> Tensor:
        return multiply(x[rows], by, gate=gate, add_to=before[rows].clone() if add else None)

    whole = run(slice(0, count))
    for rows in (slice(0, 1), slice(count - 1, count), slice(3, 5), slice(7, 12), slice(9, 25), slice(0, 33)):
        assert torch.equal(run(rows), whole[rows])
    want = exact(x, by, gate=gate, add_to=before.double() if add else None)
    rounding = torch.finfo(dtype).eps
    # Of a sum's terms, each rounded; of the gate's and the sum's own rounding.
    allowed = (8 if gate else 3) * rounding * (want.abs() + want.abs().mean(-1, keepdim=True))
    assert ((whole.double() - want).abs() <= allowed).all()


def test_float32_is_what_a_product_is_rounded_for_where_it_is_asked_for() -> None:
    by, x = product(64, 48, torch.bfloat16, norm=False, biased=False), drawn(5, 64, dtype=torch.bfloat16, seed=4)
    multiply = Products.of(EPS, torch.bfloat16, invariant=True)
    wide = torch.full((5, 48), torch.nan)
    assert multiply(x, by, out=wide) is wide
    assert torch.equal(wide.bfloat16(), multiply(x, by))
    assert torch.equal(wide, multiply(x, by).float())


def test_products_of_torch_say_the_same_within_rounding() -> None:
    dtype = torch.bfloat16
    by, x = product(64, 96, dtype, norm=True, biased=True), drawn(5, 64, dtype=dtype, seed=4)
    ours, torchs = (Products.of(EPS, dtype, invariant=which)(x, by, gate=True) for which in (True, False))
    torch.testing.assert_close(ours, torchs, atol=0.03, rtol=0.03)
