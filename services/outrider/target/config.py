"""What one target worker is told at start: one frozen dataclass, parsed once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.address import check_advertised
from outrider.engine import EngineConfig
from outrider.engine.config import ATTENTIONS, NATIVE_VARIANTS
from outrider.telemetry.logging import LOG_FORMATS

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """One target worker process."""

    model: str
    """A checkpoint directory, a GGUF file, or the name of a known model."""
    listen: str
    """HOST:PORT; port 0 lets the system choose."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    model_name: str = ""
    """Name under which clients ask for the model; empty takes that of `model`."""
    advertise: str = ""
    """HOST:PORT under which routers reach it; empty takes the bound address."""
    metadata_url: str = ""
    """Metadata store that carries the lease; empty runs without one."""
    max_sequences: int = 64
    max_draft_tokens: int = 32
    """Most drafted tokens judged in one step of one sequence."""
    threads: int = 0
    """Threads of one engine step on CPU; 0 leaves it to torch. Long steps may have more: engine.prefill_threads."""
    tensor_parallel: int = 1
    """Processes that divide the model among themselves; on GPUs one each, from cuda:0 on."""
    step_timeout_s: float = 30.0
    """With tensor_parallel above 1: how long a step, or one process's silence, may last before all start again."""
    cpu_cores: tuple[int, ...] = ()
    """Cores the process may run on; empty means all. What only helps with prompts keeps to the others, if there are."""
    metrics_listen: str = ""
    """HOST:PORT of the Prometheus endpoint; empty means none."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, how long running sequences may take before their routers must move them."""
    log_format: str = "human"

    def __post_init__(self) -> None:
        if self.metadata_url:
            check_advertised("advertise", self.advertise, self.listen)
        if not 1 <= self.max_sequences <= self.engine.max_batch_tokens:
            # Each decoding sequence takes at least one token of every step.
            bound = self.engine.max_batch_tokens
            raise ValueError(f"max_sequences: must be in 1..{bound} (max_batch_tokens), got {self.max_sequences}")
        if not 0 <= self.max_draft_tokens < self.engine.max_batch_tokens:
            raise ValueError("max_draft_tokens: must be at least 0 and below max_batch_tokens")
        if self.threads < 0:
            raise ValueError("threads: must not be negative")
        if not 1 <= self.tensor_parallel <= MAX_RANKS:
            raise ValueError(f"tensor_parallel: must be in 1..{MAX_RANKS}, got {self.tensor_parallel}")
        if self.tensor_parallel > 1 and ":" in self.engine.device:
            raise ValueError(f"device: {self.engine.device!r} names one device, tensor_parallel wants several")
        if self.step_timeout_s <= 0:
            raise ValueError("step_timeout_s: must be above 0")
        if self.drain_timeout_s < 0:
            raise ValueError("drain_timeout_s: must not be negative")

    @property
    def served_name(self) -> str:
        """As clients ask for it."""
        if self.model_name:
            return self.model_name
        return os.path.basename(self.model.rstrip("/")).removesuffix(".gguf")


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU cores as in taskset: 0,2,4-7. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def parse_arguments(arguments: Sequence[str] | None = None) -> TargetConfig:
    """Reads the command line. An unknown or impossible option ends the process with a message that names it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return TargetConfig(
            model=options.model,
            listen=options.listen,
            engine=EngineConfig(
                dtype=options.dtype,
                device=options.device,
                quantization=options.quantization,
                native_variant=options.native_variant,
                execution="native" if options.require_native else "auto",
                block_size=options.block_size,
                kv_cache_bytes=options.kv_cache_bytes,
                max_batch_tokens=options.max_batch_tokens,
                max_context_len=options.max_context_len,
                prefix_cache=not options.no_prefix_cache,
                attention=options.attention,
                cuda_graphs=not options.no_cuda_graphs,
                prefill_threads=options.prefill_threads,
            ),
            model_name=options.model_name,
            advertise=options.advertise,
            metadata_url=options.metadata,
            max_sequences=options.max_sequences,
            max_draft_tokens=options.max_draft_tokens,
            threads=options.threads,
            tensor_parallel=options.tensor_parallel,
            step_timeout_s=options.step_timeout,
            cpu_cores=parse_cores(options.cpu_cores),
            metrics_listen=options.metrics_listen,
            drain_timeout_s=options.drain_timeout,
            log_format=options.log_format,
        )
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider.target",
        description="Target worker: verifies drafts and owns the text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH|NAME", help="checkpoint directory, GGUF file or known model")
    add("--model-name", default="", metavar="NAME", help="name clients ask for; that of the model if empty")
    add("--listen", required=True, metavar="HOST:PORT", help="gRPC address; port 0 lets the system choose")
    add("--advertise", default="", metavar="HOST:PORT", help="address routers use; the bound one if empty")
    add("--metadata", default="", metavar="URL", help="metadata store that carries the lease; none if empty")
    add("--dtype", default="bfloat16", help="of weights, activations and KV cache")
    add("--device", default="cpu", help="torch device")
    add("--quantization", default="none", help="of the linear layers' weights: none, int8, int4 or fp8")
    add("--block-size", type=int, default=16, metavar="TOKENS", help="tokens in one KV block")
    add(
        "--kv-cache-bytes",
        type=int,
        default=None,
        metavar="N",
        help="memory for KV, all of it taken at start; chosen if not given",
    )
    add("--max-batch-tokens", type=int, default=512, metavar="N", help="most tokens of one engine step")
    add("--max-sequences", type=int, default=64, metavar="N", help="open sequences, beyond which opens are refused")
    add("--max-context-len", type=int, default=None, metavar="N", help="cap on positions; the model's if not given")
    add("--max-draft-tokens", type=int, default=32, metavar="N", help="drafted tokens judged in one step of a sequence")
    add("--no-prefix-cache", action="store_true", help="share no KV between sequences")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="processes that divide the model among themselves")
    add("--step-timeout", type=float, default=30.0, metavar="S", help="longest tensor-parallel step, then all restart")
    add(
        "--native-variant",
        default="auto",
        metavar="NAME",
        help=f"CPU kernels: {', '.join(NATIVE_VARIANTS)}",
    )
    add("--require-native", action="store_true", help="refuse to start without our kernels")
    add("--attention", default="auto", choices=ATTENTIONS, help="triton runs on CUDA; auto takes it there")
    add("--no-cuda-graphs", action="store_true", help="launch every kernel of a step on a GPU")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of one step; 0 leaves it to torch")
    add("--prefill-threads", type=int, default=0, metavar="N", help="CPU threads that read a prompt, if more")
    add("--cpu-cores", default="", metavar="LIST", help="cores to run on, as in 0,2-3; all if empty")
    add("--metrics-listen", default="", metavar="HOST:PORT", help="Prometheus endpoint; none if empty")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="after SIGTERM, time for running sequences")
    add("--log-format", default="human", choices=LOG_FORMATS, help="of the lines on stderr")
    return parser
