"""The kinds of CPU that our kernels are compiled for, and which of them this one is. Compiles and loads nothing."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_AVX512 = {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512dq": "-mavx512dq", "avx512vl": "-mavx512vl"}
_AVX512_BF16 = {**_AVX512, "avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"}
_AMX = {**_AVX512_BF16, "amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile the kernels. A text's bits are those of one variant."""

    name: str
    features: frozenset[str]
    """That the CPU must have, as Linux names them."""
    flags: tuple[str, ...]
    """Of the compiler."""

    @property
    def missing(self) -> list[str]:
        """What this CPU lacks for it."""
        return sorted(self.features - cpu_features())

    @property
    def compiles_here(self) -> bool:
        """Whether it is for this kind of machine; this very one need not be able to run it."""
        return not self.features or platform.machine() in ("x86_64", "AMD64")


def _variant(name: str, features: dict[str, str]) -> Variant:
    return Variant(name, frozenset(features), tuple(features.values()))


VARIANTS = (
    _variant("amx", _AMX),
    _variant("avx512-bf16", _AVX512_BF16),
    _variant("avx512", {**_AVX512, "fma": "-mfma"}),
    _variant("avx2", {"avx2": "-mavx2", "fma": "-mfma"}),
    # A product and its sum in one instruction where there is one, as on ARM.
    Variant("portable", frozenset(), ("-ffp-contract=fast",)),
)
"""The quickest first."""


def runnable_variants() -> list[str]:
    """Those that this CPU can run, if there is a compiler; the quickest first."""
    return [variant.name for variant in VARIANTS if not variant.missing]


@cache
def cpu_features() -> frozenset[str]:
    """Of the first core; none where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())


def multiplies_bfloat16() -> bool:
    """Whether torch finds instructions for it; without, it emulates them, many times slower than float32."""
    wanted = {"bf16"} if platform.machine() == "aarch64" else {"avx512_bf16", "amx_bf16"}
    return bool(wanted & cpu_features())
