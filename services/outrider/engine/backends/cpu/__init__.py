"""Our own kernels for CPUs, compiled where they run.

Not here: which models they can run (`models/`). Begin with `llama.py`, which calls the kernels of `llama/`.
"""

from outrider.engine.backends.cpu.build import KernelsMissing, load_kernels, start_helpers
from outrider.engine.backends.cpu.llama import (
    NATIVE_QUANTIZATIONS,
    Join,
    NativeAttention,
    NativeLlama,
    Projection,
    can_run_natively,
    runs_natively,
    why_not_native,
)
from outrider.engine.backends.cpu.variants import multiplies_bfloat16, runnable_variants

__all__ = [
    "NATIVE_QUANTIZATIONS",
    "Join",
    "KernelsMissing",
    "NativeAttention",
    "NativeLlama",
    "Projection",
    "can_run_natively",
    "load_kernels",
    "multiplies_bfloat16",
    "runnable_variants",
    "runs_natively",
    "start_helpers",
    "why_not_native",
]
