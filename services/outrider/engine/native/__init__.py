"""Our own kernels for CPUs, compiled where they run."""

from outrider.engine.native.compiled import load_library, start_helpers
from outrider.engine.native.llama import NativeAttention, NativeLlama, can_run_natively, may_run_natively

__all__ = [
    "NativeAttention",
    "NativeLlama",
    "can_run_natively",
    "load_library",
    "may_run_natively",
    "start_helpers",
]
