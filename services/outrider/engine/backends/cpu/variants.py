"""The kinds of CPU that our kernels are compiled for, and those that this CPU can run. Compiles and loads nothing."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_AVX512 = {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512dq": "-mavx512dq", "avx512vl": "-mavx512vl"}
_AVX512_BF16 = {**_AVX512, "avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"}
_AMX = {**_AVX512_BF16, "amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16", "amx_int8": "-mamx-int8"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile the kernels. Variants may differ in the bits of logits."""

    name: str
    features: frozenset[str]
    """Features that the CPU must have, as Linux names them."""
    flags: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        return sorted(self.features - cpu_features())

    @property
    def compiles_here(self) -> bool:
        """Whether it is for this architecture; this CPU need not be able to run it."""
        return not self.features or platform.machine() in ("x86_64", "AMD64")


def _variant(name: str, features: dict[str, str]) -> Variant:
    return Variant(name, frozenset(features), tuple(features.values()))


VARIANTS = (
    _variant("amx", _AMX),
    _variant("avx512-bf16", _AVX512_BF16),
    _variant("avx512", {**_AVX512, "fma": "-mfma"}),
    _variant("avx2", {"avx2": "-mavx2", "fma": "-mfma"}),
    # Allows fused multiply-add, which the compiler uses if the architecture always has it, as ARM.
    Variant("portable", frozenset(), ("-ffp-contract=fast",)),
)
"""Fastest first."""


def runnable_variants() -> list[str]:
    """Names of the variants that this CPU can run, fastest first."""
    return [variant.name for variant in VARIANTS if not variant.missing]


@cache
def cpu_features() -> frozenset[str]:
    """Features of the first core; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions that torch uses for bfloat16. Without, torch emulates it, far slower than
    float32."""
    wanted = {"bf16"} if platform.machine() == "aarch64" else {"avx512_bf16", "amx_bf16"}
    return bool(wanted & cpu_features())
