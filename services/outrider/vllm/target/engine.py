"""Makes vLLM's engine for a target: the options of a target as vLLM's, those that have no meaning there refused."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from outrider.engine import CheckpointError, EngineConfig, ModelInfo
from outrider.engine.checkpoints.fetching import directory
from outrider.prefix import block_hashes
from outrider.target.config import TargetConfig
from outrider.vllm.front import HEAD, WORKER
from outrider.vllm.scheduler import METHOD
from outrider.vllm.target.grammar import Bitmasks

log = logging.getLogger(__name__)

SCHEDULER = "outrider.vllm.scheduler.Scheduler"

_TAKEN = ("dtype", "device", "num_blocks", "kv_cache_bytes", "max_batch_tokens", "prefix_cache", "max_context_len")
"""Options of an engine that vLLM has too; others belong to our own engine."""
_OURS = (
    *("model", "tokenizer", "scheduler_cls", "worker_cls", "speculative_config", "logprobs_mode"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "kv_events_config", "additional_config"),
    *("trust_remote_code", "skip_tokenizer_init", "max_num_seqs"),
)
"""vLLM's arguments that a target sets itself."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"vllm_args: {message}")


def engine_args(config: TargetConfig, model: Path) -> EngineArgs:
    """vLLM's arguments. Raises ValueError for an option that vLLM cannot take."""
    _check_options(config.engine)
    parser = EngineArgs.add_cli_args(_Parser(add_help=False))
    given = parser.parse_args(_split(config.vllm_args))
    plain = parser.parse_args([])
    for name in _OURS:
        if getattr(given, name, None) != getattr(plain, name, None):
            raise ValueError(f"vllm_args: --{name.replace('_', '-')} is set by the target itself")
    for name, value in _settings(config, model).items():
        # What was given in vLLM's own words counts.
        if name in _OURS or getattr(given, name) == getattr(plain, name):
            setattr(given, name, value)
    return EngineArgs.from_cli_args(given)


def _split(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"vllm_args: {error}") from None


def _check_options(engine: EngineConfig) -> None:
    plain = EngineConfig()
    for name in EngineConfig.__dataclass_fields__:
        if name not in _TAKEN and name != "cuda_graphs" and getattr(engine, name) != getattr(plain, name):
            raise ValueError(f"{name}: is for engine `outrider`; give vLLM's arguments in --vllm-args")
    device = engine.device.partition(":")[0]
    if device != current_platform.device_type and engine.device != plain.device:
        raise ValueError(f"device: this vLLM runs on {current_platform.device_type}, not on {engine.device}")


def _settings(config: TargetConfig, model: Path) -> dict[str, Any]:
    engine, count = config.engine, config.max_draft_tokens
    on_cpu = current_platform.is_cpu()
    found: dict[str, Any] = {
        "model": str(model),
        "tokenizer": str(model),
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "dtype": engine.dtype,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": engine.max_batch_tokens,
        "enable_prefix_caching": engine.prefix_cache,
        "enforce_eager": on_cpu or not engine.cuda_graphs,
        "tensor_parallel_size": config.tensor_parallel,
        "scheduler_cls": SCHEDULER,
        "worker_cls": WORKER,
        "logprobs_mode": "raw_logprobs",
        "speculative_config": {"method": METHOD, "num_speculative_tokens": max(1, count)},
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=engine.prefix_cache, publisher="null"),
    }
    if config.remote_head:
        found["additional_config"] = {HEAD: str(directory(config.remote_head))}
    if engine.max_context_len is not None:
        found["max_model_len"] = engine.max_context_len
    if engine.num_blocks is not None:
        found["num_gpu_blocks_override"] = engine.num_blocks
    if engine.kv_cache_bytes is not None:
        found["kv_cache_memory_bytes"] = engine.kv_cache_bytes
    return found


def make_core(args: EngineArgs, on_failed: Any) -> EngineCore:
    """Loads the model. `on_failed` is called, from another thread, when a process of it has ended. Raises
    CheckpointError."""
    try:
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, OSError) as error:
        raise CheckpointError(str(args.model), f"vLLM: {error}") from error
    core = EngineCore(config, Executor.get_class(config), log_stats=True, executor_fail_callback=on_failed)
    core.structured_output_manager.backend = Bitmasks(config.model_config.get_vocab_size())
    core.scheduler.kv_event_publisher = CachedPrefixes(core.scheduler.block_size)
    return core


def info_of(core: EngineCore, version: str) -> ModelInfo:
    config = core.vllm_config
    model, cache = config.model_config, config.cache_config
    dtype = str(model.dtype).removeprefix("torch.")
    return ModelInfo(
        vocab_size=model.get_vocab_size(),
        max_context_len=model.max_model_len,
        block_size=core.scheduler.block_size,
        num_blocks=cache.num_gpu_blocks,
        dtype=dtype,
        device=current_platform.device_type,
        execution=_execution(core, version, dtype),
    )


def _execution(core: EngineCore, version: str, dtype: str) -> str:
    """What decides the bits of its logits, besides the weights."""
    config = core.vllm_config
    parts = [f"vllm-{version}", dtype, current_platform.get_device_name().replace(" ", "-") or "cpu"]
    if config.model_config.quantization:
        parts.append(str(config.model_config.quantization))
    if not config.model_config.enforce_eager:
        parts.append("compiled")
    if (ranks := config.parallel_config.tensor_parallel_size) > 1:
        parts.append(f"tp{ranks}")
    return "-".join(parts)


class CachedPrefixes:
    """Takes the place of vLLM's publisher of KV events. Our names of the blocks by vLLM's."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[Any, bytes] = {}
        self._changes: dict[bytes, bool] = {}

    def publish(self, batch: Any) -> None:
        try:
            self._follow(batch.events)
        except Exception:
            # Names of prefixes only decide where a router sends a prompt, and vLLM's engine ends by what escapes here.
            log.exception("the names of cached prefixes are incomplete")

    def _follow(self, events: Iterable[Any]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._changes.update(dict.fromkeys(self._stored(event), True))
                case BlockRemoved():
                    self._changes.update(dict.fromkeys(self._removed(event.block_hashes), False))
                case AllBlocksCleared():
                    self._changes.update(dict.fromkeys(self._removed(list(self._names)), False))

    def shutdown(self) -> None: ...

    def get_publisher_config(self) -> None: ...

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """The names added and removed since the last call."""
        changes, self._changes = self._changes, {}
        return [name for name, held in changes.items() if held], [name for name, held in changes.items() if not held]

    def _stored(self, event: BlockStored) -> list[bytes]:
        if event.block_size != self._block_size or event.lora_name is not None:
            return []
        parent = None
        if event.parent_block_hash is not None and (parent := self._names.get(event.parent_block_hash)) is None:
            return []
        names = block_hashes(event.token_ids, self._block_size, _salt(event), parent=parent)
        self._names.update(zip(event.block_hashes, names, strict=True))
        return names

    def _removed(self, hashes: Iterable[Any]) -> Iterator[bytes]:
        for one in hashes:
            if (name := self._names.pop(one, None)) is not None:
                yield name


def _salt(event: BlockStored) -> bytes:
    """The tenant's salt, which vLLM mixes into the first block of a prompt."""
    extra = (event.extra_keys or [None])[0]
    return bytes.fromhex(extra[0]) if extra else b""
