"""Makes an Engine from a checkpoint directory: reads the weights and sizes the KV cache; `assembly.py` does the
rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.checkpoint_files import READ_HERE, end_tokens, engine_fault, other_weights, quantization_of
from outrider.engine.backends import cpu
from outrider.engine.checkpoints import checkpoints, gguf_fours, packed_weights
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.quantization import BYTES_PER_WEIGHT, Float8Linear, Int4Linear, Int8Linear, reads_fp8
from outrider.engine.checkpoints.quantization import check as check_quantization
from outrider.engine.engine import Engine
from outrider.engine.loading.assembly import assemble, can_run_on_gpu, kv_shape, working_bytes
from outrider.engine.loading.comparison import answers_problem
from outrider.engine.loading.draft_checkpoint import load_draft_model
from outrider.engine.models.architectures import architecture_problem, model_problem, tensors_problem, text_part
from outrider.engine.models.context import context_len, num_positions
from outrider.engine.models.decoder import register_attention
from outrider.engine.models.fused import keep_to_vector_code
from outrider.engine.models.memory import (
    LinearWeights,
    Need,
    Quantized,
    available_bytes,
    count_linear,
    count_parameters,
    kv_blocks,
)
from outrider.engine.models.probe import attention_problem, on_meta
from outrider.engine_config import EngineConfig

log = logging.getLogger(__name__)

_PROBED: dict[str, str | None] = {}
"""Why the engine cannot run a model, by its config; None where it can."""


def load_engine(path: Path | str, config: EngineConfig | None = None, host_bytes: int = 0) -> Engine:
    """Loads a checkpoint directory. Raises CheckpointError that names the fault.

    `host_bytes`: what else the process will take of the machine's memory.
    """
    path, config = Path(path), config or EngineConfig()
    checkpoints.check(path)
    if (found := engine_fault(path)) is not None:
        raise CheckpointError(found.file, found.message)
    if others := other_weights(path):
        log.info("left alone, as the model's weights are in other files: %s", ", ".join(others))
    _check_device(config.device)
    check_quantization(config.quantization, config.device)
    _quiet_transformers()
    keep_to_vector_code()
    settings = read_settings(path)
    context = served_context(path, settings, config.max_context_len)
    config = _settle_dtype(config, settings)
    device_type = torch.device(config.device).type
    num_blocks = kv_blocks(
        _need(path, settings, config, context),
        available_bytes(config.device) - (host_bytes if device_type == "cpu" else 0),
        device_type,
        blocks=config.num_blocks,
        kv_bytes=config.kv_cache_bytes,
    )
    model, token_map = _load_model(path, config, context)
    engine = assemble(
        model,
        config,
        num_blocks=num_blocks,
        max_context_len=context,
        eos_token_ids=_ends(path, settings.vocab_size),
        token_map=token_map,
    )
    # All memory that grows with use is allocated by now: a step only needs room for its own tokens.
    kv_bytes = engine.kv_bytes_per_token * config.block_size * num_blocks
    log.info(
        "weights of %.0f MB, KV cache of %d blocks, %.0f MB", engine.weight_bytes / 1e6, num_blocks, kv_bytes / 1e6
    )
    return engine


def _ends(path: Path, vocab_size: int) -> tuple[int, ...]:
    ends = end_tokens(path)
    if outside := [i for i in ends if i >= vocab_size]:
        message = f"eos_token_id: {outside[0]} is outside the vocabulary of {vocab_size} tokens"
        raise CheckpointError(f"{path}/config.json", message)
    return ends


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CheckpointError("device", f"{name!r} is not a torch device") from error
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise CheckpointError("device", f"{name}: models run on cpu and cuda")
    if torch.version.cuda is None:
        raise CheckpointError("device", f"{name}: the installed torch {torch.__version__} is built without CUDA")
    if (device.index or 0) >= torch.cuda.device_count():
        raise CheckpointError("device", f"{name}: {torch.cuda.device_count()} GPUs are visible here")


def read_settings(path: Path) -> Any:
    """The config of the model's text part. Raises CheckpointError for a model that this engine does not run."""
    config = _read_config(path)
    if problem := _scheme_problem(config):
        raise CheckpointError(f"{path}/config.json", f"quantization_config: {problem}")
    if problem := architecture_problem(config) or _problem_of(config):
        raise CheckpointError(f"{path}/config.json", f"model_type {config.model_type}: {problem}")
    return config.get_text_config()


def _read_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers fails in many ways
        raise CheckpointError(f"{path}/config.json", f"transformers cannot read it: {error}") from error


def _scheme_problem(config: Any) -> str | None:
    """Why the quantized weights of this config cannot be read here; None for plain ones."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    if stated.get("quant_method") in READ_HERE:
        return None
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        AutoHfQuantizer.from_config(stated, pre_quantized=True).validate_environment(device_map=None)
    except Exception as error:  # of many kinds, for want of libraries and of devices
        return " ".join(str(error).split())
    return None


def _problem_of(config: Any) -> str | None:
    """Remembered: one process may load a model many times, as comparisons and tests do."""
    stated = config.to_json_string(use_diff=False)
    if stated not in _PROBED:
        _PROBED[stated] = _probed(config)
    return _PROBED[stated]


def _probed(config: Any) -> str | None:
    """Why the engine cannot run a model of this config, as it shows without weights."""
    try:
        shape = kv_shape(config.get_text_config())
    except Exception as error:  # transformers has configs whose layers differ
        return f"the cache holds keys and values of one shape: {error}"
    model = on_meta(config)
    return None if model is None else attention_problem(model, shape)


def _settle_dtype(config: EngineConfig, settings: Any) -> EngineConfig:
    """On a CPU, bfloat16 is kept only for our kernels or a CPU that multiplies it natively; otherwise float32 is
    faster.

    Raises CheckpointError when our kernels, or a variant of them, are required and not available.
    """
    as_asked = config.execution not in ("auto", "native") or config.quantization not in cpu.NATIVE_QUANTIZATIONS
    if (config.device, config.dtype) != ("cpu", "bfloat16") or as_asked:
        return config
    try:
        cpu.load_kernels(config.native_variant)
    except cpu.KernelsMissing as error:
        if config.native_variant != "auto":
            raise CheckpointError("native_variant", str(error)) from error
        if config.execution == "native":
            raise CheckpointError("execution", f"native kernels are required, and there are none: {error}") from error
        return _in_float32(config, str(error))
    reason = cpu.why_not_native(config, settings)
    if reason is not None and config.execution == "native":
        raise CheckpointError("execution", f"native kernels are required, and cannot run this model: {reason}")
    if reason is None or cpu.multiplies_bfloat16():
        return config
    return _in_float32(config, reason)


def _in_float32(config: EngineConfig, reason: str) -> EngineConfig:
    message = "no native kernels (%s): float32 through torch, in twice the memory and several times slower"
    log.warning(message, reason)
    return replace(config, dtype="float32")


def _load_model(path: Path, config: EngineConfig, context: int) -> tuple[PreTrainedModel, Tensor | None]:
    dtype = getattr(torch, config.dtype)
    if "outrider_draft" in checkpoints.read_config(path):
        # The kernels take the weights in int8, as they are stored: half the bytes to read.
        draft, token_map = load_draft_model(path, dtype, in_int8=cpu.runs_natively(config))
        return draft.to(config.device), token_map.to(config.device)
    from_pretrained, kept = _loading(path, config)
    try:
        whole, report = from_pretrained(
            output_loading_info=True,
            # The report names them; transformers' own refusal does not.
            ignore_mismatched_sizes=True,
            dtype=dtype,
            attn_implementation=register_attention(),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except Exception as error:  # transformers fails in many ways
        raise CheckpointError(str(path), f"transformers cannot load it: {error}") from error
    if problem := tensors_problem(report):
        raise CheckpointError(str(path), problem)
    loaded = text_part(whole)
    problem = model_problem(loaded) or attention_problem(loaded, kv_shape(loaded.config.get_text_config()))
    _refuse(path, loaded, problem)
    modules = dict(loaded.named_modules())
    if cpu.why_not_native(config, loaded.config) is None:
        kept |= gguf_fours.read(path, modules)
    # transformers joins experts to one module, which stays plain.
    plain = {name: linear for name in kept if isinstance(linear := modules.get(name), nn.Linear)}
    for name, linear in plain.items():
        kept[name].bias = linear.bias
        loaded.set_submodule(name, kept[name])
    if plain and config.device != "cpu" and not can_run_on_gpu(loaded, config):
        # torch would widen them for each product.
        log.info("they become plain weights all the same: our kernels do not run this model")
        for name, linear in plain.items():
            loaded.set_submodule(name, linear)
    loaded = loaded.to(config.device)
    _refuse(path, loaded, answers_problem(loaded, whole, config, context))
    return loaded, None


def _refuse(path: Path, model: PreTrainedModel, problem: str | None) -> None:
    if problem is not None:
        raise CheckpointError(f"{path}/config.json", f"model_type {model.config.model_type}: {problem}")


def _loading(path: Path, config: EngineConfig) -> tuple[Callable[..., Any], dict[str, packed_weights.Kept]]:
    """transformers' loading of the checkpoint, and the layers that stay as they are."""
    stated = quantization_of(checkpoints.read_config(path)) or {}
    if stated.get("quant_method") not in READ_HERE:
        return partial(AutoModelForCausalLM.from_pretrained, path), {}
    settings = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    for part in {id(part): part for part in (settings, settings.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    dtype: torch.dtype = getattr(torch, config.dtype)
    plain = packed_weights.read(path, stated, dtype, keep=_kept_kinds(config, settings.get_text_config()))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    return partial(kind.from_pretrained, None, config=settings, state_dict=plain.state), plain.kept


def _kept_kinds(config: EngineConfig, settings: Any) -> tuple[type[packed_weights.Kept], ...]:
    """The kinds of layers that this device multiplies as a checkpoint has them."""
    if cpu.why_not_native(config, settings) is None:
        return Int8Linear, Int4Linear
    return (Int8Linear, Float8Linear) if reads_fp8(torch.device(config.device)) else (Int8Linear,)


def served_context(path: Path, settings: Any, configured: int | None = None) -> int:
    """In positions. Raises CheckpointError that names a field of config.json."""
    return _positions(path, lambda: context_len(settings, configured))


def stated_context(path: Path) -> int:
    """That of a model which another engine may run, in positions. Raises CheckpointError that names a field of
    config.json."""
    settings = _read_config(path).get_text_config()
    return _positions(path, lambda: num_positions(settings))


def _positions(path: Path, count: Callable[[], int]) -> int:
    try:
        return count()
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}/config.json", str(error)) from error


def _need(path: Path, settings: Any, config: EngineConfig, context: int) -> Need:
    dtype: torch.dtype = getattr(torch, config.dtype)
    kv_heads, head_dim = kv_shape(settings)
    block_bytes = 2 * settings.num_hidden_layers * kv_heads * head_dim * dtype.itemsize * config.block_size
    context_blocks = -(-context // config.block_size)
    parameters, kept = count_parameters(path), 0
    if getattr(settings, "quantization_config", None) and (model := on_meta(settings)) is not None:
        # Their files have fewer numbers than the model, into which they are unpacked.
        parameters = model.num_parameters()
        if config.device != "cpu" and config.dtype != "float32" and can_run_on_gpu(model, config):
            kept = packed_weights.count_rows_of_8_bits(path, _kept_kinds(config, settings))
    need = Need(
        path.name,
        parameters,
        dtype.itemsize,
        config.dtype,
        block_bytes,
        context_blocks,
        working_bytes=working_bytes(settings, config),
    )
    if kept:
        return replace(need, quantized=Quantized("8 bits", LinearWeights(kept, kept), 1.0, stored=True))
    if config.quantization == "none":
        return need
    linear = Quantized(config.quantization, count_linear(path), BYTES_PER_WEIGHT[config.quantization])
    return replace(need, quantized=linear)


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
