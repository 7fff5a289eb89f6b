"""The options of an engine. Outside its package, so that a command line is read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outrider.configuration import NO_OPTION

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4", "fp8")
ATTENTIONS = ("auto", "sdpa", "triton")
# As in backends/cpu/variants.py.
NATIVE_VARIANTS = ("auto", "amx", "avx512-bf16", "avx512", "avx2", "portable")
EXECUTIONS = ("auto", "native", "fused", "transformers")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is loaded and how much it may hold."""

    dtype: str = "bfloat16"
    """Type of weights, activations and KV cache: float32, bfloat16 or float16."""
    device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1."""
    block_size: int = 16
    """Tokens in one KV block, the unit of sharing and eviction."""
    num_blocks: int | None = None
    """KV blocks in all. Not given: as many as `kv_cache_bytes` has room for."""
    kv_cache_bytes: int | None = None
    """Memory for KV blocks. Not given: on a CPU, room for 8 full contexts, at most 1 GiB and half of what is free, and
    on a GPU nine tenths of what the weights leave free."""
    max_batch_tokens: int = 512
    """Most tokens of one forward pass."""
    prefix_cache: bool = True
    """Keep KV blocks for later sequences with the same prefix."""
    max_context_len: int | None = None
    """Longest context in tokens. Not given: the model's own."""
    execution: str = "auto"
    """How a step runs. native: Outrider's CPU kernels, for bfloat16 models of the Llama family, with weights in int8,
    int4 or bfloat16. fused: few, large torch operations, for Llama models, on CPUs for the whole family. transformers:
    any decoder. auto: the first of these that can run the model."""
    native_variant: str = "auto"
    """Instructions for which the native CPU kernels are compiled: amx, avx512-bf16, avx512, avx2, portable. auto: the
    fastest that the CPU has."""
    quantization: str = "none"
    """Quantization of the linear layers' weights: none, int8, int4 or fp8.

    quantization.py says what runs where."""
    attention: str = "auto"
    """Attention kernels. sdpa: torch's, on any device. triton: Outrider's paged kernels, on CUDA. auto: triton where it
    runs, else sdpa."""
    cuda_graphs: bool = True
    """Replay steps as CUDA graphs. Needs `attention: triton`."""
    batch_invariant: bool = True
    """On a GPU, multiply so that a token has the same bits alone and in any batch, in fused bfloat16 and float16: texts
    with and without drafts are equal. false: torch's products, which may be quicker in long prompts and large
    batches."""
    graph_rows: int = 64
    """Up to this many sequences, each number of drafted tokens has a CUDA graph. Above it there are few, each for twice
    the size of the one before."""
    prefill_threads: int = 0
    """CPU threads of native steps with 64 tokens or more. A number below torch's own has no effect."""
    graph_min_tokens: Annotated[int, NO_OPTION] = 16
    """CUDA graphs have multiples of this many tokens.

    buckets.py says why one is not better."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.execution not in EXECUTIONS:
            raise ValueError(f"execution: {self.execution!r} is not one of {', '.join(EXECUTIONS)}")
        if self.native_variant not in NATIVE_VARIANTS:
            raise ValueError(f"native_variant: {self.native_variant!r} is not one of {', '.join(NATIVE_VARIANTS)}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention: {self.attention!r} is not one of {', '.join(ATTENTIONS)}")
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization: {self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
        if self.quantization != "none" and (self.execution, self.device) == ("fused", "cpu"):
            raise ValueError("execution: fused joins plain weights; with quantization it is native or transformers")
        for name in ("block_size", "max_batch_tokens", "graph_rows", "graph_min_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if self.prefill_threads < 0:
            raise ValueError("prefill_threads: must not be negative")
        for name in ("num_blocks", "kv_cache_bytes", "max_context_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1")
