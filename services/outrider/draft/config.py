"""What one draft worker is told at start: one frozen dataclass, parsed once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from outrider.drafters import DrafterKind, ModelConfig, NgramConfig
from outrider.engine import EngineConfig
from outrider.rpc.roles import Role
from outrider.worker.config import WorkerConfig, from_options, make_parser, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(WorkerConfig):
    """One draft worker process. For n-grams only the vocabulary of `model` is read."""

    kind: DrafterKind = DrafterKind.COMBINED
    drafting: ModelConfig = field(default_factory=ModelConfig)
    ngrams: NgramConfig = field(default_factory=NgramConfig)
    max_sequences: int = 256
    max_draft_tokens: int = 8
    """Most tokens of one proposal, whatever a router asks for."""

    role: ClassVar[Role] = Role.DRAFT

    def __post_init__(self) -> None:
        WorkerConfig.__post_init__(self)
        if self.max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens: must be at least 1, got {self.max_draft_tokens}")


def parse_arguments(arguments: Sequence[str] | None = None) -> DraftConfig:
    """Reads the command line. An unknown or impossible option ends the process with a message that names it."""
    return parse(_parser(), _config_of, arguments)


def _config_of(options: argparse.Namespace) -> DraftConfig:
    return from_options(
        DraftConfig,
        options,
        kind=DrafterKind(options.kind),
        engine=from_options(EngineConfig, options),
        drafting=from_options(ModelConfig, options),
        ngrams=from_options(NgramConfig, options),
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("outrider.draft", "Draft worker: proposes what a target may say next.")
    add = parser.add_argument
    model = ModelConfig()
    kinds = [kind.value for kind in DrafterKind]
    add("--max-sequences", type=int, default=256, metavar="N", help="open sequences, beyond which opens are refused")
    add("--kind", default="combined", choices=kinds, help="a model, n-grams of the text so far, or both")
    add("--max-draft-tokens", type=int, default=8, metavar="N", help="most tokens of one proposal")
    confidence, siblings, match = model.min_confidence, model.num_siblings, NgramConfig().min_match
    add("--min-confidence", type=float, default=confidence, metavar="P", help="end a proposal below this chance")
    add("--num-siblings", type=int, default=siblings, metavar="N", help="tokens named beside a proposal; 0: none")
    add("--min-match", type=int, default=match, metavar="N", help="shortest n-gram that is continued")
    return parser
