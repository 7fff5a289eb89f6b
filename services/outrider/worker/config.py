"""The options of every worker. Each worker's own package adds the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from outrider.configuration import Option
from outrider.engine_config import EngineConfig
from outrider.model_names import hub_model, served_name
from outrider.process_config import ProcessConfig
from outrider.rpc.access.roles import ClusterSecret


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU cores as in taskset: 0,2,4-7. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True) and int(first) <= int(last or first)):
            raise ValueError(f"{text!r} is not a list like 0,2-3")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


@dataclass(frozen=True, slots=True)
class WorkerConfig(ProcessConfig):
    model: str
    """A checkpoint directory, a GGUF file, the name of a known model, or hf://OWNER/NAME@REVISION."""
    listen: str
    """HOST:PORT for gRPC; port 0 lets the system choose."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    model_name: str = ""
    """Name of the model for clients and other processes. Empty: that of `model`."""
    max_sequences: int = 64
    """Most open sequences; further ones are refused."""
    threads: int = 0
    """CPU threads of one step; 0 leaves them to torch."""
    cpu_cores: Annotated[tuple[int, ...], Option(read=parse_cores)] = ()
    """Cores that the process may run on, as in 0,2-3. Empty: all."""
    step_timeout_s: float = 60.0
    """Longest time of one step, in seconds. After it the worker ends itself, and its sequences move to others. A target
    that has measured its steps ends after 20 times its longest step, but not before 3 s (on a GPU or vLLM 20 s)."""
    secret: Annotated[ClusterSecret | None, Option("cluster_secret_file", read=ClusterSecret.read, secret=True)] = None
    """File with the secret of the cluster. With it, or with certificates, only routers may call a target and only
    targets a draft. Without both, anybody who reaches the port may."""

    def __post_init__(self) -> None:
        self.check_process()
        self.check_port(self.listen)
        hub_model(self.model)
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences: must be at least 1, got {self.max_sequences}")
        if self.threads < 0:
            raise ValueError(f"threads: must not be negative, got {self.threads}")
        if not self.step_timeout_s > 0:
            raise ValueError(f"step_timeout_s: must be above 0, got {self.step_timeout_s:g}")

    @property
    def served_name(self) -> str:
        """The name under which clients and peers know the model."""
        return self.model_name or served_name(self.model)
