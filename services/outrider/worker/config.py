"""What every worker is told at start, and the flags for it. A worker's own package adds the rest."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from outrider.address import check_advertised
from outrider.engine import EngineConfig
from outrider.engine.config import ATTENTIONS, NATIVE_VARIANTS
from outrider.rpc.certificates import TlsFiles, check_plain, cluster_tls
from outrider.rpc.roles import Role
from outrider.telemetry.logging import LOG_FORMATS
from outrider.telemetry.ops import ANY_LOOPBACK_PORT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process."""

    model: str
    """A checkpoint directory, a GGUF file, or the name of a known model."""
    listen: str
    """HOST:PORT; port 0 lets the system choose."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    model_name: str = ""
    """Name under which others know the model; empty takes that of `model`."""
    advertise: str = ""
    """HOST:PORT under which others reach it; empty takes the bound address."""
    metadata_url: str = ""
    """Metadata store that carries the lease; empty runs without one."""
    max_sequences: int = 64
    """Open sequences, beyond which opens are refused."""
    threads: int = 0
    """Threads of one engine step on CPU; 0 leaves it to torch."""
    cpu_cores: tuple[int, ...] = ()
    """Cores the process may run on; empty means all."""
    tls_dir: str = ""
    """Directory with `tls.crt`, `tls.key` and `ca.crt` of this role; empty serves in plain text."""
    insecure: bool = False
    """Serve in plain text also where other machines can reach it."""
    ops_listen: str = ANY_LOOPBACK_PORT
    """HOST:PORT for operators' tools, in plain HTTP; empty means none."""
    step_timeout_s: float = 30.0
    """How long a step may last before the process no longer counts as live. Of processes that divide one model also how
    long one may be silent, before all start again."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, how long open sequences may take before others must take them over."""
    log_format: str = "human"
    role: ClassVar[Role]

    def __post_init__(self) -> None:
        if self.metadata_url:
            check_advertised("advertise", self.advertise, self.listen)
        check_plain("listen", self.listen, self.tls_dir, self.insecure)
        cluster_tls(self.role, self.tls_dir)
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences: must be at least 1, got {self.max_sequences}")
        if self.threads < 0:
            raise ValueError(f"threads: must not be negative, got {self.threads}")
        if not self.step_timeout_s > 0:
            raise ValueError(f"step_timeout_s: must be above 0, got {self.step_timeout_s:g}")
        # Not below: no comparison holds for NaN.
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"drain_timeout_s: must not be negative, got {self.drain_timeout_s:g}")

    @property
    def tls(self) -> TlsFiles | None:
        return TlsFiles(Path(self.tls_dir)) if self.tls_dir else None

    @property
    def served_name(self) -> str:
        """As others know the model."""
        return self.model_name or os.path.basename(self.model.rstrip("/")).removesuffix(".gguf")


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU cores as in taskset: 0,2,4-7. Raises argparse.ArgumentTypeError."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True) and int(first) <= int(last or first)):
            raise argparse.ArgumentTypeError(f"cpu_cores: {text!r} is not a list like 0,2-3")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """With the options that every worker has. Each is stored under the name of the field that it sets."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_process(parser)
    _add_engine(parser)
    return parser


def from_options(cls: type[C], options: argparse.Namespace, /, **others: Any) -> C:
    """A configuration of the options that bear its fields' names, and of `others`. The rest keeps its defaults."""
    given = {**vars(options), **others}
    return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})


def parse(
    parser: argparse.ArgumentParser, make: Callable[[argparse.Namespace], C], arguments: Sequence[str] | None
) -> C:
    """Reads the command line. An unknown or impossible option ends the process with a message that names it."""
    options = parser.parse_args(arguments)
    try:
        return make(options)
    except ValueError as error:
        parser.error(str(error))


def _add_process(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="PATH|NAME", help="checkpoint directory, GGUF file or known model")
    add("--model-name", default="", metavar="NAME", help="name of the model for others; its own if empty")
    add("--listen", required=True, metavar="HOST:PORT", help="gRPC address; port 0 lets the system choose")
    add("--advertise", default="", metavar="HOST:PORT", help="address others use; the bound one if empty")
    add("--metadata", dest="metadata_url", default="", metavar="URL", help="carries the lease; none if empty")
    add("--tls-dir", default="", metavar="DIR", help="has tls.crt, tls.key and ca.crt; plain text if empty")
    add("--insecure", action="store_true", help="plain text also where other machines can reach it")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads of one step; 0 leaves it to torch")
    add("--cpu-cores", type=parse_cores, default="", metavar="LIST", help="cores to run on, as in 0,2-3; all if empty")
    add("--ops-listen", default=ANY_LOOPBACK_PORT, metavar="HOST:PORT", help="health, metrics, options; none if empty")
    add(
        "--step-timeout",
        dest="step_timeout_s",
        type=float,
        default=30.0,
        metavar="S",
        help="longest step of a worker that counts as live",
    )
    add(
        "--drain-timeout",
        dest="drain_timeout_s",
        type=float,
        default=30.0,
        metavar="S",
        help="after SIGTERM, time for open sequences",
    )
    add("--log-format", default="human", choices=LOG_FORMATS, help="of the lines on stderr")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dtype", default="bfloat16", help="of weights, activations and KV cache")
    add("--device", default="cpu", help="torch device")
    add("--quantization", default="none", help="of the linear layers' weights: none, int8, int4 or fp8")
    add("--block-size", type=int, default=16, metavar="TOKENS", help="tokens in one KV block")
    add("--kv-cache-bytes", type=int, metavar="N", help="memory for KV, all of it taken at start; chosen if not given")
    add("--max-batch-tokens", type=int, default=512, metavar="N", help="most tokens of one engine step")
    add("--max-context-len", type=int, metavar="N", help="cap on positions; the model's if not given")
    add("--no-prefix-cache", dest="prefix_cache", action="store_false", help="share no KV between sequences")
    variants = ", ".join(NATIVE_VARIANTS)
    add("--native-variant", default="auto", metavar="NAME", help=f"CPU kernels: {variants}")
    add(
        "--require-native",
        dest="execution",
        action="store_const",
        const="native",
        default="auto",
        help="refuse to start without our kernels",
    )
    add("--attention", default="auto", choices=ATTENTIONS, help="triton runs on CUDA; auto takes it there")
    add("--no-cuda-graphs", dest="cuda_graphs", action="store_false", help="launch every kernel of a step on a GPU")
