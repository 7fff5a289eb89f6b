"""How many multiplications and additions one core does in a second, with a variant's vectors and nothing to read."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from outrider.engine.backends.cpu.build import FLAGS, run_compiler
from outrider.engine.backends.cpu.variants import VARIANTS

_LANES = {"portable": 4, "avx2": 8, "avx512": 16}
_CHAINS, _ROUNDS = 12, 4_000_000
# Enough chains that none waits for the result before it, in registers of their own.
_SOURCE = """
typedef float vec __attribute__((vector_size(4 * LANES)));
float multiply(long rounds, float factor) {
    vec sums[CHAINS];
    const vec b = factor - (vec){};
    for (int n = 0; n < CHAINS; n++) sums[n] = b * (float)n;
    for (long i = 0; i < rounds; i++)
        #pragma GCC unroll 16
        for (int n = 0; n < CHAINS; n++) sums[n] = sums[n] * b + b;
    float total = 0;
    for (int n = 0; n < CHAINS; n++) total += sums[n][n % LANES];
    return total;
}
"""


def fma_peak(variant: str) -> float | None:
    """Operations a second, two for each lane of a multiply-add, fused where the variant may fuse it: the best of some
    trials. None for variants that multiply bfloat16 itself."""
    if variant not in _LANES:
        return None
    multiply = _compiled(variant, _LANES[variant])
    best_s = min(_seconds(multiply) for _ in range(10))
    return 2.0 * _LANES[variant] * _CHAINS * _ROUNDS / best_s


def _compiled(variant: str, lanes: int) -> Callable[[int, float], float]:
    flags = next(known.flags for known in VARIANTS if known.name == variant)
    with tempfile.TemporaryDirectory() as scratch:
        source, library = Path(scratch) / "peak.c", Path(scratch) / "peak.so"
        source.write_text(_SOURCE)
        sizes = f"-DLANES={lanes}", f"-DCHAINS={_CHAINS}"
        run_compiler(["cc", *FLAGS, *flags, "-ffp-contract=fast", *sizes, str(source), "-o", str(library)])
        multiply = ctypes.CDLL(str(library)).multiply
    multiply.argtypes, multiply.restype = [ctypes.c_long, ctypes.c_float], ctypes.c_float
    return multiply


def _seconds(multiply: Callable[[int, float], float]) -> float:
    started_s = time.perf_counter()
    multiply(_ROUNDS, 0.5)
    return time.perf_counter() - started_s
