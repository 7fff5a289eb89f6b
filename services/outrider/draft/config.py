"""What one draft worker is told at start: one frozen dataclass, parsed once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.address import check_advertised
from outrider.drafters import DrafterKind, ModelConfig, NgramConfig
from outrider.drafters.loading import LONG_MATCH
from outrider.engine import EngineConfig
from outrider.engine.config import ATTENTIONS, NATIVE_VARIANTS


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft worker process."""

    model: str
    """A checkpoint directory, a GGUF file, or the name of a known model. For n-grams only its vocabulary is read."""
    listen: str
    """HOST:PORT; port 0 lets the system choose."""
    kind: DrafterKind = DrafterKind.COMBINED
    engine: EngineConfig = field(default_factory=EngineConfig)
    drafting: ModelConfig = field(default_factory=ModelConfig)
    ngrams: NgramConfig = field(default_factory=lambda: NgramConfig(min_match=LONG_MATCH))
    model_name: str = ""
    """The draft's own name, for people; empty takes that of `model`."""
    advertise: str = ""
    """HOST:PORT under which routers reach it; empty takes the bound address."""
    metadata_url: str = ""
    """Metadata store that carries the lease; empty runs without one."""
    max_sequences: int = 256
    """Open sequences, beyond which opens are refused."""
    max_draft_tokens: int = 8
    """Most tokens of one proposal, whatever a router asks for."""
    threads: int = 0
    """Threads of one forward on CPU; 0 leaves it to torch."""
    cpu_cores: tuple[int, ...] = ()
    """Cores the process may run on; empty means all."""
    metrics_listen: str = ""
    """HOST:PORT of the Prometheus endpoint; empty means none."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, how long open sequences may take before their routers must move them."""
    log_format: str = "human"

    def __post_init__(self) -> None:
        if self.metadata_url:
            check_advertised("advertise", self.advertise, self.listen)
        for name in ("max_sequences", "max_draft_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if self.threads < 0:
            raise ValueError("threads: must not be negative")
        if not self.drain_timeout_s >= 0:
            raise ValueError("drain_timeout_s: must not be negative")

    @property
    def served_name(self) -> str:
        """The draft's own name."""
        if self.model_name:
            return self.model_name
        return os.path.basename(self.model.rstrip("/")).removesuffix(".gguf")


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU cores as in taskset: 0,2,4-7. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"cpu_cores: {text!r} is not a list like 0,2-3")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def parse_arguments(arguments: Sequence[str] | None = None) -> DraftConfig:
    """Reads the command line. An unknown or impossible option ends the process with a message that names it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _config_of(options)
    except ValueError as error:
        parser.error(str(error))


def _config_of(options: argparse.Namespace) -> DraftConfig:
    kind = DrafterKind(options.kind)
    default_match = NgramConfig().min_match if kind is DrafterKind.NGRAM else LONG_MATCH
    return DraftConfig(
        model=options.model,
        listen=options.listen,
        kind=kind,
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
        ),
        drafting=ModelConfig(
            min_confidence=options.min_confidence,
            num_siblings=options.num_siblings,
            max_batch_tokens=options.max_batch_tokens,
        ),
        ngrams=NgramConfig(min_match=options.min_match or default_match),
        model_name=options.model_name,
        advertise=options.advertise,
        metadata_url=options.metadata,
        max_sequences=options.max_sequences,
        max_draft_tokens=options.max_draft_tokens,
        threads=options.threads,
        cpu_cores=parse_cores(options.cpu_cores),
        metrics_listen=options.metrics_listen,
        drain_timeout_s=options.drain_timeout,
        log_format=options.log_format,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider.draft",
        description="Draft worker: proposes what a target may say next.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_drafting(parser)
    _add_engine(parser)
    _add_process(parser)
    return parser


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kinds = [kind.value for kind in DrafterKind]
    confidence, most = ModelConfig().min_confidence, 8
    add("--model", required=True, metavar="PATH|NAME", help="checkpoint directory, GGUF file or known model")
    add("--model-name", default="", metavar="NAME", help="the draft's own name; that of the model if empty")
    add("--kind", default="combined", choices=kinds, help="a model, n-grams of the text so far, or both")
    add("--max-draft-tokens", type=int, default=most, metavar="N", help="most tokens of one proposal")
    add(
        "--min-confidence",
        type=float,
        default=confidence,
        metavar="P",
        help="end a proposal below this chance",
    )
    siblings = ModelConfig().num_siblings
    add("--num-siblings", type=int, default=siblings, metavar="N", help="tokens named beside a proposal; 0: none")
    add("--min-match", type=int, default=0, metavar="N", help="shortest n-gram that is continued; 0: 3, or 2 for ngram")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
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
    add("--max-batch-tokens", type=int, default=512, metavar="N", help="most tokens of one forward")
    add("--max-context-len", type=int, default=None, metavar="N", help="cap on positions; the model's if not given")
    add("--no-prefix-cache", action="store_true", help="share no KV between sequences")
    add(
        "--native-variant",
        default="auto",
        metavar="NAME",
        help=f"CPU kernels: {', '.join(NATIVE_VARIANTS)}",
    )
    add("--require-native", action="store_true", help="refuse to start without our kernels")
    add("--attention", default="auto", choices=ATTENTIONS, help="triton runs on CUDA; auto takes it there")
    add("--no-cuda-graphs", action="store_true", help="launch every kernel of a step on a GPU")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of one forward; 0 leaves it to torch")
    add("--cpu-cores", default="", metavar="LIST", help="cores to run on, as in 0,2-3; all if empty")


def _add_process(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="gRPC address; port 0 lets the system choose")
    add("--advertise", default="", metavar="HOST:PORT", help="address routers use; the bound one if empty")
    add("--metadata", default="", metavar="URL", help="metadata store that carries the lease; none if empty")
    add("--max-sequences", type=int, default=256, metavar="N", help="open sequences, beyond which opens are refused")
    add("--metrics-listen", default="", metavar="HOST:PORT", help="Prometheus endpoint; none if empty")
    add("--drain-timeout", type=float, default=30.0, metavar="S", help="after SIGTERM, time for open sequences")
    add("--log-format", default="human", choices=["human", "json"], help="of the lines on stderr")
