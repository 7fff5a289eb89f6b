"""The options of one draft worker: one frozen dataclass, parsed once at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.configuration import load
from outrider.drafting.config import ModelConfig
from outrider.rpc.access.roles import Role
from outrider.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """One draft worker process."""

    target_model: str = ""
    """The target, by name or path, if its tokenizer differs from that of `model`. Only tokens with the same text in
    both are proposed. Only the target's tokenizer and config.json are read."""
    head: str = ""
    """Directory of a draft head of `model`: EAGLE-3, MTP, Medusa or DFlash. It drafts for targets that name the same
    head in `remote_head`. Of `model` only the embedding and the output layer are read."""
    adapters: str = ""
    """Directory of a low-rank adapter of `model` in peft's format, or of one for each tenant, in a directory with the
    tenant's name. An adapter drafts for its tenant only; without one a request drafts with the model alone."""
    candidate: bool = False
    """Draft only for requests that a rollout gives this version of the draft (`outrider rollout start`)."""
    drafting: ModelConfig = field(default_factory=ModelConfig)
    max_sequences: int = 256
    """Most open sequences; further ones are refused."""
    max_draft_tokens: int = 8
    """Most tokens of one proposal, whatever a router asks for."""

    role: ClassVar[Role] = Role.DRAFT

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        if self.max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens: must be at least 1, got {self.max_draft_tokens}")
        if self.head and self.target_model:
            raise ValueError("target_model: not together with head: a head drafts for its own `model`")
        if self.head and self.adapters:
            raise ValueError("adapters: not together with head: they are of `model`")


def parse_arguments(arguments: Sequence[str] | None = None) -> DraftConfig:
    """Reads file, environment and command line. An invalid option ends the process with a message that names it."""
    return load(DraftConfig, "outrider.draft", "Draft worker: proposes what a target may say next.", arguments)
