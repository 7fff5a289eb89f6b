"""Drafts by name, as they are compared: kinds of lookups, directories of models and of heads, and mixtures of these.

A model with another tokenizer than the target's drafts as `outrider draft --target-model` lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.draft.worker import DraftWorker
from outrider.drafters import load_drafter
from outrider.drafting.heads import HeadDrafts
from outrider.drafting.heads.loading import is_head
from outrider.drafting.source import KINDS, DraftSource, make_sources, reads_states
from outrider.engine import Engine, EngineConfig, resolve
from outrider.engine.checkpoints.fetching import directory
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.local import DrafterSource
from outrider.target.drafts.head import tried_head

_BEGINNING = "Once upon a time"

Make = Callable[[], DraftSource]


class Drafts:
    """What makes the sources of each draft that was named; models are loaded once."""

    def __init__(self, engine: Engine, target: Path, names: Sequence[str], max_sequences: int, most: int) -> None:
        """names: of single drafts. most: tokens of a proposal of a model or head. Raises CheckpointError for one that
        does not go with the target, ValueError for heads that read different layers."""
        self._make: dict[str, Make] = {}
        for name in names:
            self._make[name] = _lookup(name) if name in KINDS else _loaded(engine, target, name, max_sequences, most)
        taps = {source.taps for make in self._make.values() if reads_states(source := make())}
        if len(taps) > 1:
            raise ValueError("drafts: heads that read different layers are compared apart")
        self.taps = next(iter(taps), None)
        """The layers whose states heads read; None without a head."""

    def sources(self, parts: Sequence[str]) -> list[DraftSource]:
        """Fresh ones, which remember nothing of an earlier replay."""
        return [self._make[part]() for part in parts]

    def serves(self, parts: Sequence[str]) -> bool:
        """Whether a target may have these together: each once, one model and one head at most."""
        sources = self.sources(parts)
        models = sum(isinstance(source, DrafterSource) for source in sources)
        return models <= 1 and sum(map(reads_states, sources)) <= 1 and len(set(parts)) == len(parts)

    def check(self, parts: Sequence[str]) -> None:
        """Raises ValueError for a mixture that is not served."""
        if not self.serves(parts):
            raise ValueError(f"drafts: {'+'.join(parts)} is not served: one model and one head at most, each once")


def _lookup(name: str) -> Make:
    return lambda: make_sources([name])[0]


def _loaded(engine: Engine, target: Path, name: str, max_sequences: int, most: int) -> Make:
    path = directory(name)
    if is_head(path):
        head = tried_head(engine, target, path, load_tokenizer(target).encode(_BEGINNING, add_special_tokens=True))
        return lambda: HeadDrafts(head, most)
    drafter = load_drafter(resolve(name), engine=EngineConfig(prefix_cache=False), target=target)
    return lambda: DrafterSource(DraftWorker(drafter, max_sequences), most)
