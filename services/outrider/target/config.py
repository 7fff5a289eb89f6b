"""The options of one target worker: one frozen dataclass, parsed once at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from outrider.configuration import Option, load
from outrider.drafting.lookup import NAMES
from outrider.drafting.source import KINDS
from outrider.rpc.access.roles import Role
from outrider.samples import MAX_BYTES, MAX_DAYS, Cipher, SampleStore, read_cipher
from outrider.worker.config import WorkerConfig

MAX_RANKS = 64
ENGINES = ("outrider", "vllm")
GRAMMAR_BYTES = 256 << 20
MIN_GRAMMAR_BYTES = MIN_SAMPLES_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(WorkerConfig):
    """One target worker process. Long steps may have more threads: engine.prefill_threads. What only helps with
    prompts, and what tries grammars, keeps off `cpu_cores` where there are others."""

    runs_on: Annotated[str, Option("engine")] = "outrider"
    """What runs the model: outrider, our own engine, or vllm, which has to be installed in this environment."""
    vllm_args: str = ""
    """With engine vllm: further arguments of `vllm serve`."""
    max_draft_tokens: int = 32
    """Most drafted tokens verified in one step of one sequence."""
    grammar_bytes: int = GRAMMAR_BYTES
    """Host memory for the grammars of structured output, cached or in use. One tenant gets at most half. On a CPU the
    memory plan at start reserves it."""
    lookups: str = ",".join(NAMES)
    """Where this target looks up drafts itself. ngram: in the text so far. prediction: in the output that a client
    predicts. suffix: in earlier answers under the same cache salt, which it remembers in at most 64 MB until the
    process ends; off by default. Empty: nowhere."""
    head: str = ""
    """Directory of a draft head for this model: a published EAGLE-3, MTP, Medusa or DFlash head, or one that `outrider
    distill --kind` made. It drafts in this process, between steps."""
    head_tokens: int = 5
    """Most tokens that `head` drafts in one step, each by one more pass; on GPUs up to 8 are recorded."""
    remote_head: str = ""
    """Directory of a draft head for this model that draft workers run (`outrider draft --head`). The target sends them
    the hidden states that it reads, one vector per token."""
    feature_bits: int = 16
    """Bits of a number that a remote head is sent: 16 or 8. With 8, half as much is sent."""
    samples: str = ""
    """Directory for samples of tenants that consent to them (`samples` in the tenant's record). Empty: none is kept."""
    samples_bytes: int = MAX_BYTES
    """Most bytes of all samples. Above it, those with the highest acceptance are removed first."""
    samples_days: float = MAX_DAYS
    """Days after which a sample is removed."""
    samples_key: Annotated[Cipher | None, Option("samples_key_file", read=read_cipher, secret=True)] = None
    """A file with the key that encrypts samples: 32 random bytes in URL-safe base64 (Fernet)."""
    tensor_parallel: int = 1
    """With engine vllm: processes that divide the model among themselves; on GPUs one each."""

    role: ClassVar[Role] = Role.TARGET

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        if self.runs_on not in ENGINES:
            raise ValueError(f"engine: {self.runs_on!r} is not one of {', '.join(ENGINES)}")
        if self.vllm_args and self.runs_on != "vllm":
            raise ValueError("vllm_args: need engine vllm")
        if self.tensor_parallel > 1 and self.runs_on != "vllm":
            raise ValueError("tensor_parallel: needs engine vllm")
        if self.head and self.runs_on != "outrider":
            raise ValueError("head: needs engine outrider; with vllm give remote_head, and --head to draft workers")
        if self.head_tokens < 1:
            raise ValueError(f"head_tokens: must be at least 1, got {self.head_tokens}")
        if self.feature_bits not in (8, 16):
            raise ValueError(f"feature_bits: must be 8 or 16, got {self.feature_bits}")
        if self.head and self.remote_head:
            raise ValueError("remote_head: not together with head")
        if not (self.samples_bytes >= MIN_SAMPLES_BYTES and self.samples_days > 0):
            raise ValueError(f"samples: at least {MIN_SAMPLES_BYTES} bytes and more than 0 days")
        bound = self.engine.max_batch_tokens
        if self.max_sequences > bound:
            # Each decoding sequence takes at least one token of every step.
            raise ValueError(f"max_sequences: must be in 1..{bound} (max_batch_tokens), got {self.max_sequences}")
        if not 0 <= self.max_draft_tokens < bound:
            raise ValueError("max_draft_tokens: must be at least 0 and below max_batch_tokens")
        if self.grammar_bytes < MIN_GRAMMAR_BYTES:
            raise ValueError(f"grammar_bytes: must be at least {MIN_GRAMMAR_BYTES}, got {self.grammar_bytes}")
        if unknown := sorted(set(self.lookup_names) - KINDS.keys()):
            raise ValueError(f"lookups: {unknown[0]!r} is not one of {', '.join(sorted(KINDS))}")
        if not 1 <= self.tensor_parallel <= MAX_RANKS:
            raise ValueError(f"tensor_parallel: must be in 1..{MAX_RANKS}, got {self.tensor_parallel}")
        if self.tensor_parallel > 1 and ":" in self.engine.device:
            raise ValueError(f"device: {self.engine.device!r} names one device, tensor_parallel wants several")

    @property
    def sample_store(self) -> SampleStore | None:
        if not self.samples:
            return None
        return SampleStore(Path(self.samples), self.samples_key, self.samples_bytes, self.samples_days)

    @property
    def lookup_names(self) -> list[str]:
        return [name for part in self.lookups.split(",") if (name := part.strip())]


def parse_arguments(arguments: Sequence[str] | None = None) -> TargetConfig:
    """Reads file, environment and command line. An invalid option ends the process with a message that names it."""
    return load(TargetConfig, "outrider.target", "Target worker: verifies drafts and owns the text.", arguments)
