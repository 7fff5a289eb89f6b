"""What a comparison is about: the target, the drafts by name, and the texts.

A model with another tokenizer than the target's drafts as `outrider draft --speaks` lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.comparison.step_line import Clock
from outrider.comparison.texts import Question, Text, kept_back, make_texts, told_apart
from outrider.draft.worker import DraftWorker
from outrider.drafters import load_drafter
from outrider.drafting.source import KINDS, DraftSource, make_sources
from outrider.engine import HEAD_INPUT, Engine, EngineConfig, Row, resolve, weights_revision
from outrider.engine.checkpoints.fetching import directory
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.adapters import is_adapter
from outrider.heads import HeadDrafts
from outrider.heads.loading import is_head
from outrider.samples import Cipher
from outrider.sim.pair import Answered, DrafterSource, Pair
from outrider.target.drafts.head import engine_of, tried_head

_CHUNK = 256
_BEGINNING = "Once upon a time"

Make = Callable[[], DraftSource]
Report = Callable[[str], None]
Parts = tuple[str, ...]
"""The names of a mixture's sources; of none: plain decoding."""


@dataclass(frozen=True, slots=True)
class CompareConfig:
    target: str
    drafts: tuple[str, ...]
    """Names of lookups, models or directories; several joined by + are one mixture."""
    questions: tuple[Question, ...]
    """None with a corpus."""
    kept: Path
    """Directory of the answers that targets have written."""
    streams: tuple[int, ...] = (1, 8, 32)
    max_new_tokens: int = 128
    max_draft_tokens: int = 4
    """Of a proposal of a model or a head."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    threads: int = 0
    """torch's; 0 leaves its default."""
    corpus: Path | None = None
    """Of a distillation: the answers that it has kept back are compared."""
    cipher: Cipher | None = None
    """Of an encrypted corpus."""

    def __post_init__(self) -> None:
        for name in ("drafts", "questions", "streams"):
            if not getattr(self, name) and not (name == "questions" and self.corpus):
                raise ValueError(f"{name}: at least one")
        if min(self.streams) != 1:
            raise ValueError("streams: must include 1, and nothing below it")

    @property
    def mixtures(self) -> list[Parts]:
        return [tuple(name.split("+")) for name in dict.fromkeys(self.drafts)]


class LoadedDrafts:
    """What makes the sources of each draft that was named; models are loaded once."""

    def __init__(
        self,
        engine: Engine,
        target: Path,
        names: Sequence[str],
        max_sequences: int,
        most: int,
        *,
        prefix_cache: bool = False,
    ) -> None:
        """names: of single drafts. most: tokens of a proposal of a model or head. Raises CheckpointError for one that
        does not go with the target, ValueError for heads that read different layers."""

        def made(name: str) -> Make:
            return _loaded(engine, target, name, max_sequences, most, prefix_cache=prefix_cache)

        self._make: dict[str, Make] = {}
        for name in names:
            self._make[name] = _lookup(name) if name in KINDS else made(name)
        taps = {source.taps for make in self._make.values() if (source := make()).taps is not None}
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
        return models <= 1 and sum(source.taps is not None for source in sources) <= 1 and len(set(parts)) == len(parts)

    def check(self, parts: Sequence[str]) -> None:
        """Raises ValueError for a mixture that is not served."""
        if not self.serves(parts):
            raise ValueError(f"drafts: {'+'.join(parts)} is not served: one model and one head at most, each once")


def _lookup(name: str) -> Make:
    return lambda: make_sources([name])[0]


def _loaded(engine: Engine, target: Path, name: str, max_sequences: int, most: int, *, prefix_cache: bool) -> Make:
    path = directory(name)
    if is_head(path):
        head = tried_head(engine, target, path, load_tokenizer(target).encode(_BEGINNING, add_special_tokens=True))
        its = engine_of(engine, head, prefix_cache=prefix_cache)
        return lambda: HeadDrafts(head, most, its)
    config = EngineConfig(prefix_cache=prefix_cache, device=engine.info.device)
    drafter = load_drafter(path if is_adapter(path) else resolve(name), engine=config, target=target)
    return lambda: DrafterSource(DraftWorker(drafter, max_sequences), most)


@dataclass(frozen=True, slots=True)
class Loaded:
    config: CompareConfig
    engine: Engine
    drafts: LoadedDrafts
    texts: list[Text]

    def answer(self, engine: Engine, parts: Parts, streams: int, clock: Clock) -> tuple[Pair, list[Answered]]:
        """All texts, greedily, by `engine` with fresh sources of these drafts."""
        pair = Pair(
            engine,
            None,
            max_sequences=streams,
            lookups=(),
            sources=self.drafts.sources(parts),
            clock=clock,
        )
        prompts, predictions = [text.prompt for text in self.texts], [text.prediction for text in self.texts]
        # A text that was cut does not end as the target's answers do.
        most = [max(1, len(text.answer)) for text in self.texts]
        return pair, pair.answer(prompts, most, speculate=bool(parts), predictions=predictions)

    def read(self, report: Report) -> tuple[list[Tensor], float | None]:
        """One pass of the target over the texts, where a head reads its states or the answers may not be its own: the
        states of each text, and the share of the answers' tokens that the target would say."""
        config = self.config
        taps, existed = self.drafts.taps, bool(config.corpus) or any(one.answer for one in config.questions)
        if taps is None and not existed:
            return [], None
        report(f"the target reads {sum(len(text.tokens) for text in self.texts):,} tokens")
        read = [_read(self.engine, text, taps or (HEAD_INPUT,)) for text in self.texts]
        states = [] if taps is None else [found for found, _ in read]
        share = sum(same for _, same in read) / sum(len(text.answer) for text in self.texts)
        return states, round(share, 4) if existed else None


def load(config: CompareConfig, report: Report) -> Loaded:
    """Raises CheckpointError for a model or head that cannot be used, ValueError for mixtures that are not served."""
    if config.threads:
        torch.set_num_threads(config.threads)
    target = resolve(config.target, report)
    engine = load_engine(target, replace(config.engine, prefix_cache=False))
    names = [part for parts in config.mixtures for part in parts]
    drafts = LoadedDrafts(engine, target, names, max(config.streams), config.max_draft_tokens)
    for parts in config.mixtures:
        drafts.check(parts)
    if config.corpus is not None:
        texts = kept_back(config.corpus, engine.info.vocab_size, config.max_new_tokens, config.cipher)
    else:
        tokenizer, kept = load_tokenizer(target), config.kept / weights_revision(target)
        texts = make_texts(engine, tokenizer, config.questions, config.max_new_tokens, kept, report)
    if left_out := len(texts) - len(compared := told_apart(texts)):
        report(f"leaves out {left_out} of {len(texts)} answers: to each prompt one is compared")
    return Loaded(config, engine, drafts, compared)


def _read(engine: Engine, text: Text, taps: tuple[int, ...]) -> tuple[Tensor, int]:
    """The states of its tokens, and how many tokens of the answer the target would say."""
    sequence, found, same, tokens = engine.kv.open([]), [], 0, text.tokens
    for start in range(0, len(tokens), _CHUNK):
        ids = tokens[start : start + _CHUNK]
        end = start + len(ids)
        asked = min(len(ids), max(0, end - len(text.prompt) + 1))
        logits, states = engine.forward_tapped([Row(sequence, ids, asked, num_tapped=len(ids))], taps)
        found.append(states.clone())
        following = tokens[end - asked + 1 : end + 1]
        same += sum(a == b for a, b in zip(logits.argmax(-1).tolist(), following, strict=False))
    engine.kv.close(sequence)
    return torch.cat(found), same
