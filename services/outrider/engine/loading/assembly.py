"""Makes an Engine from a loaded model: the decoder's execution, attention, the KV cache, graphs. Reads no files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.attention import Attention, KVCache, Shape, make_attention
from outrider.engine.attention.paged import TritonAttention, Workspace
from outrider.engine.backends import cpu
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.quantization import Int4Linear, Int8Linear, quantize
from outrider.engine.engine import Engine, ModelInfo
from outrider.engine.models.context import layer_windows
from outrider.engine.models.decoder import Decoder, TransformersDecoder
from outrider.engine.models.families import head_dim
from outrider.engine.models.fused import FusedLlama, can_fuse
from outrider.engine.models.fused_gpu import GpuLlama, can_fuse_on_gpu
from outrider.engine.run.buckets import make_buckets
from outrider.engine.run.graphs import GraphRecorder, GraphRunner, GraphShape
from outrider.engine_config import EngineConfig

_STREAM_WORKSPACE = 32 << 20
"""Of cuBLAS, for the stream of recorded steps and that of others."""


def assemble(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    num_blocks: int,
    max_context_len: int,
    eos_token_ids: tuple[int, ...] = (),
    token_map: Tensor | None = None,
) -> Engine:
    """An engine around a model that is on config.device already; takes over its weights.

    Raises CheckpointError when the configured attention or execution cannot run here.
    """
    model.eval().requires_grad_(False)
    quantize(model, config.quantization)
    settings = model.config.get_text_config()
    decoder, attention = _execution(model, max_context_len, config)
    width = int(model.get_output_embeddings().weight.shape[0])
    cache = _allocate_cache(settings, config, num_blocks)
    info = ModelInfo(
        vocab_size=settings.vocab_size,
        max_context_len=max_context_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        dtype=config.dtype,
        device=config.device,
        execution=decoder.execution,
        eos_token_ids=eos_token_ids,
    )
    graphs = _graphs(decoder, attention, cache, width, info, config)
    engine = Engine(decoder, cache, info, config, token_map, attention=attention, graphs=graphs)
    if torch.device(config.device).type == "cuda":
        engine.warm_up()
    return engine


def can_run_on_gpu(model: PreTrainedModel, config: EngineConfig) -> bool:
    """Whether our kernels for GPUs run it, as far as model and options decide."""
    return config.execution in ("auto", "fused") and config.attention in ("auto", "triton") and can_fuse_on_gpu(model)


def kv_shape(settings: Any) -> tuple[int, int]:
    """Number of key heads, and their width."""
    kv_heads = getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads
    return kv_heads, head_dim(settings)


def working_bytes(settings: Any, config: EngineConfig) -> int:
    """What steps on a GPU allocate beside weights and cache, at most; 0 on a CPU."""
    if torch.device(config.device).type == "cpu":
        return 0
    tokens = config.max_batch_tokens
    vocab_size: int = settings.vocab_size
    shape = Shape(settings.num_attention_heads, *kv_shape(settings), config.block_size)
    dtype: torch.dtype = getattr(torch, config.dtype)
    # Recorded steps have theirs, and others make theirs: a workspace of the splits, and logits.
    each = Workspace.num_bytes(shape, tokens, dtype.itemsize) + 4 * tokens * vocab_size
    return 2 * (each + _STREAM_WORKSPACE)


def _attention(settings: Any, config: EngineConfig) -> Attention:
    kv_heads, head_dim = kv_shape(settings)
    try:
        shape = Shape(settings.num_attention_heads, kv_heads, head_dim, config.block_size)
        return make_attention(config.attention, shape, torch.device(config.device), layer_windows(settings))
    except ValueError as error:
        field, _, message = str(error).partition(": ")
        raise CheckpointError(field, message) from error


def _execution(model: PreTrainedModel, context: int, config: EngineConfig) -> tuple[Decoder, Attention]:
    """The first execution that can run the model, or the configured one."""
    wanted = config.execution
    if cpu.runs_natively(config) and cpu.can_run_natively(model, config.block_size):
        kernels = cpu.load_kernels(config.native_variant)
        return cpu.NativeLlama(kernels, model, context, config.prefill_threads), cpu.NativeAttention(kernels)
    attention = _attention(model.config.get_text_config(), config)
    if isinstance(attention, TritonAttention) and can_run_on_gpu(model, config):
        return GpuLlama(model, context, invariant=config.batch_invariant), attention
    quantized = any(isinstance(m, Int8Linear | Int4Linear) for m in model.modules())
    if wanted == "auto" and (config.quantization != "none" or quantized):
        # Fused execution on a CPU joins and repacks plain weights.
        wanted = "transformers"
    if wanted in ("auto", "fused") and can_fuse(model):
        return FusedLlama(model, context), attention
    if wanted in ("auto", "transformers"):
        return TransformersDecoder(model), attention
    raise CheckpointError("execution", f"{wanted} cannot run this model as {config.dtype} on this machine")


def _allocate_cache(settings: Any, config: EngineConfig, num_blocks: int) -> KVCache:
    kv_heads, head_dim = kv_shape(settings)
    device = torch.device(config.device)
    # One block more on a GPU: padding tokens of recorded steps are written to it, and nothing reads it.
    blocks = num_blocks + 1 if device.type == "cuda" else num_blocks
    return KVCache.allocate(
        layers=settings.num_hidden_layers,
        kv_heads=kv_heads,
        slots=blocks * config.block_size,
        head_dim=head_dim,
        dtype=getattr(torch, config.dtype),
        device=device,
    )


def _graphs(
    decoder: Decoder, attention: Attention, cache: KVCache, width: int, info: ModelInfo, config: EngineConfig
) -> GraphRunner | None:
    device = torch.device(config.device)
    if device.type != "cuda" or not config.cuda_graphs or not isinstance(attention, TritonAttention):
        return None
    shape = GraphShape(
        buckets=make_buckets(config.graph_rows, config.max_batch_tokens, config.graph_min_tokens),
        logits_width=width,
        max_blocks=-(-info.max_context_len // config.block_size),
        scratch_slot=info.num_blocks * config.block_size,
    )
    with torch.cuda.device(device):
        graphs = GraphRunner(decoder, attention, cache, shape, device, GraphRecorder(device))
        try:
            graphs.capture_all()
        except RuntimeError as error:
            # Code that reads a value on the host synchronises, for example rotary tables that grow with the context.
            message = f"this model's steps cannot be recorded, turn it off: {error}"
            raise CheckpointError("cuda_graphs", message) from error
    return graphs
