"""Like `distribution`, with all shipped code between a draw and its verdict in the loop, and with faults of that code.

Two chains run on the engine, under a draft worker and a target worker that looks up n-grams besides, in virtual time.
So drafts that are late, partial, or compete with a match are counted too. Each of many texts has its own conditions:
draft length, wait, and the durations of forwards and messages.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from outrider.drafters import ModelConfig
from outrider.drafters.model import SOURCE as MODEL
from outrider.drafters.rounds import DraftChain
from outrider.drafting.lookup import LookupDrafts
from outrider.drafting.lookup.ngram import NAME as NGRAM
from outrider.drafting.lookup.ngram import NgramConfig, NgramLookup
from outrider.drafting.lookup.prediction import predictions
from outrider.drafting.lookup.suffix import History, SuffixConfig, SuffixDrafts
from outrider.drafting.source import DraftSource
from outrider.heads import HeadDrafts
from outrider.protocol.convert import sampling_to_proto
from outrider.rpc.v1 import sequence_pb2
from outrider.speculation import VerificationMode
from outrider.target.drafts.calibration import Bin, Calibration, Fit
from outrider.target.drafts.choice import Pricing
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.tree import DraftTree
from torch import Tensor

from benchmarks.support.chain_model import ChainEngine, ChainHead
from benchmarks.support.distribution import SAMPLING, DistributionResult, Fault, Models, compare_counts
from benchmarks.support.timed_pair import MakeEngine, TimedPair

# A certain path, with a choice at its end. One branch begins the path again and one enters it anywhere, so that the
# n-gram match for the choice depends on the compared length; one branch ends the text.
_WAY = 8
_CHOICE, _AGAIN, _ANYWHERE, _STOP = _WAY - 1, _WAY, _WAY + 1, _WAY + 2
VOCAB = _WAY + 3
_TARGET = {token: {token + 1: 1.0} for token in range(_CHOICE)} | {
    _CHOICE: {_AGAIN: 0.4, _ANYWHERE: 0.55, _STOP: 0.05},
    _AGAIN: {0: 1.0},
    _ANYWHERE: dict.fromkeys(range(_CHOICE), 1 / _CHOICE),
    _STOP: {0: 1.0},
}
_DRAFT = _TARGET | {_CHOICE: {_AGAIN: 0.5, _ANYWHERE: 0.4, _STOP: 0.1}}
_NOTHING = VOCAB
_OPEN = (_CHOICE, _ANYWHERE)
"""Only the tokens after these are counted: the others are certain."""
_TEXT_TOKENS = 12
_LONG_MATCH = 6


@dataclass(frozen=True, slots=True)
class _Conditions:
    """The conditions of one text."""

    prompt: list[int]
    max_draft_tokens: int
    max_batch_tokens: int = 512
    max_wait_s: float = 0.0
    min_confidence: float = 0.0
    steps: tuple[float, ...] = (1.0,)
    """Durations of the target's steps, drawn at random."""
    forward: float = 0.02
    way: float = 0.05
    """Longest message delay; uniform from 0."""
    row_prices: tuple[float, ...] = (0.0,)
    """Prices of a drafted row, drawn at random for each step."""
    first_only: bool = False
    """Whether only the first choice is counted: later ones have other conditions."""
    all_sources: bool = False
    """Whether suffixes, predictions and a head of the target's draft too."""


def _any(chance: random.Random) -> _Conditions:
    return _Conditions(
        chance.choice((_history(chance), [_CHOICE - 1], [0])),
        max_draft_tokens=chance.choice((1, 2, 4)),
        max_wait_s=chance.choice((0.0, 0.5, 1.0, 2.0)),
        min_confidence=chance.choice((0.0, 0.3)),
        steps=(0.3, 1.0, 2.0),
        forward=chance.choice((0.02, 0.25)),
        way=chance.choice((0.1, 1.0, 3.0)),
    )


def _merged(chance: random.Random) -> _Conditions:
    """A draft worker, and every kind of source in the target: lookups of three kinds, and a head."""
    return replace(_any(chance), all_sources=True)


def _crossing(chance: random.Random) -> _Conditions:
    """The draft proposes a choice some steps early, for a step verifies one token, and the n-gram match for it changes
    meanwhile."""
    return _Conditions(_history(chance), max_draft_tokens=6, max_batch_tokens=2, steps=(0.3, 1.0, 2.0))


def _borderline(chance: random.Random) -> _Conditions:
    """The proposal of a choice comes in time if few tokens follow it, and too late if many do."""
    forward = chance.choice((0.29, 0.4))
    return _Conditions([_CHOICE - 1], max_draft_tokens=6, min_confidence=0.3, forward=forward, first_only=True)


def _priced(chance: random.Random) -> _Conditions:
    """Rows are sometimes free, and sometimes cost more than the less likely choice is worth."""
    return _Conditions(
        chance.choice(([_CHOICE - 1], [0])),
        max_draft_tokens=chance.choice((2, 4)),
        max_wait_s=3.0,
        row_prices=(0.74, 0.74, 0.74, 0.0),
    )


class Conditions(enum.Enum):
    """The kinds of conditions."""

    ANY = enum.member(_any)
    MERGED = enum.member(_merged)
    CROSSING = enum.member(_crossing)
    BORDERLINE = enum.member(_borderline)
    PRICED = enum.member(_priced)


@contextmanager
def _planted(fault: Fault) -> Iterator[None]:
    """Plants the fault in the shipped code for the block."""
    planted: dict[Fault, list[tuple[Any, str, Any]]] = {
        Fault.MATCH_TAKES_OVER: [(Pricing, "offered", _match_where_it_begins_the_same)],
        Fault.LENGTH_FOLLOWS_THE_DRAW: [
            (DraftChain, "_num_worth_drawing", lambda chain, joint, peak: chain.wanted),
            (DraftChain, "ended", property(_ended_by_what_was_drawn)),
        ],
        Fault.PRICED_BY_THE_DRAW: [
            (Calibration, "_of_source", _chance_of_what_was_drawn),
        ],
    }
    shipped = [(owner, name, owner.__dict__[name]) for owner, name, _ in planted.get(fault, [])]
    for owner, name, faulty in planted.get(fault, []):
        setattr(owner, name, faulty)
    try:
        yield
    finally:
        for owner, name, code in shipped:
            setattr(owner, name, code)


def _match_where_it_begins_the_same(pricing: Pricing, drafts: SequenceDrafts, depth: int) -> DraftTree | None:
    """The match where its first token is the one that was drawn, else the drawn chain."""
    trees = {tree.source: tree for tree in drafts.buffer.trees}
    match, drawn = trees.get(NGRAM), trees.get(MODEL)
    if match is not None and (drawn is None or match.token_ids[0] == drawn.token_ids[0]):
        return match.upto(depth)
    return None if drawn is None else drawn.upto(depth)


def _ended_by_what_was_drawn(chain: DraftChain) -> bool:
    tokens = chain.token_ids
    unlikely = bool(tokens) and (tokens[-1] in chain.stop_token_ids or chain.joint < chain.min_confidence)
    return unlikely or len(tokens) >= chain.wanted


def _chance_of_what_was_drawn(calibration: Calibration, drawn: Bin) -> float:
    return calibration.own(drawn._replace(drawn=False), Fit())


def run_pair_experiment(
    *,
    draws: int = 20_000,
    conditions: Conditions = Conditions.ANY,
    fault: Fault = Fault.NONE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DistributionResult:
    """Emits at least `draws` tokens in ratio mode and compares them with the target's own distribution."""
    models, texts = Models(_logits(_TARGET), _logits(_DRAFT)), _Texts()
    with _planted(fault):
        while texts.num_tokens < draws:
            texts.write(models, conditions)
            progress(min(texts.num_tokens, draws), draws)
    expected = np.repeat(models.expected(), VOCAB + 1, axis=0)
    return compare_counts(texts.counts.reshape(-1, VOCAB), expected, VerificationMode.RATIO, fault, texts.accepted)


@dataclass(slots=True)
class _Texts:
    counts: np.ndarray[Any, np.dtype[np.float64]] = field(default_factory=lambda: np.zeros((VOCAB, VOCAB + 1, VOCAB)))
    """[last token, token that followed the same tokens earlier, next token]: the second is an n-gram match."""
    history: History = field(default_factory=lambda: History(SuffixConfig(min_match=2, max_match=8, context=8)))
    """What earlier texts said, for suffixes."""
    num_texts: int = 0
    num_verified: int = 0
    num_accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def accepted(self) -> float:
        return self.num_accepted / max(1, self.num_verified)

    def write(self, models: Models, conditions: Conditions) -> None:
        self.num_texts += 1
        chance = random.Random(self.num_texts)
        given: _Conditions = conditions.value(chance)
        more = [SuffixDrafts(self.history), predictions(), HeadDrafts(ChainHead(models.draft))]
        # Not always all: one that is the best everywhere would hide the others.
        some = [source for source in more if given.all_sources and chance.random() < 0.5]
        pair = _pair(models, given, chance, some)
        opening = _opening(self.num_texts, given, _prediction(chance) if given.all_sources else ())
        tokens, stats = pair.answer(opening)
        self._count([*given.prompt, *tokens], len(given.prompt), given.first_only)
        self.num_verified += stats.num_verified_tokens
        self.num_accepted += stats.num_accepted_tokens

    def _count(self, text: list[int], start: int, first_only: bool) -> None:
        followed: dict[tuple[int, ...], int] = {}
        for position in range(1, len(text)):
            last, longer = text[position - 1], tuple(text[max(0, position - _LONG_MATCH) : position])
            if position >= start and last in _OPEN:
                self.counts[last, followed.get(longer, _NOTHING), text[position]] += 1
                if first_only:
                    return
            followed[longer] = text[position]


def _logits(chances: dict[int, dict[int, float]]) -> Tensor:
    table = torch.full((VOCAB, VOCAB), -torch.inf)
    for token, followers in chances.items():
        for follower, chance in followers.items():
            table[token, follower] = SAMPLING.temperature * math.log(chance)
    return table


def _pair(models: Models, given: _Conditions, chance: random.Random, more: Sequence[DraftSource]) -> TimedPair:
    config = NgramConfig(min_match=2, max_match=2)
    lookups = LookupDrafts(NGRAM, lambda opening, tokens: NgramLookup(tokens, config))
    return TimedPair(
        target=_engine(models.target),
        draft=_engine(models.draft),
        step_s=lambda: chance.choice(given.steps),
        forward_s=lambda: given.forward,
        delay_s=lambda: given.way * chance.random(),
        drafting=ModelConfig(min_confidence=given.min_confidence),
        max_batch_tokens=given.max_batch_tokens,
        row_price=lambda cost: chance.choice(given.row_prices),
        sources=[lookups, *more],
    )


def _engine(table: Tensor) -> MakeEngine:
    blocks, most = _TEXT_TOKENS // 16 + 8, _TEXT_TOKENS + 64
    return lambda before: ChainEngine(table, before, num_blocks=blocks, max_context_len=most)


def _opening(number: int, given: _Conditions, prediction: Sequence[int]) -> sequence_pb2.OpenSequence:
    # Noise depends on seed and position, so every text needs another seed.
    sampling = sampling_to_proto(replace(SAMPLING, seed=number, top_p=1.0))
    return sequence_pb2.OpenSequence(
        sequence_id=number,
        prompt_token_ids=given.prompt,
        predicted_token_ids=prediction,
        sampling=sampling,
        mode=sequence_pb2.VERIFICATION_MODE_RATIO,
        stopping=sequence_pb2.Stopping(max_new_tokens=_TEXT_TOKENS, stop_token_ids=[_STOP]),
        speculation=sequence_pb2.Speculation(
            max_draft_tokens=given.max_draft_tokens,
            max_own_draft_tokens=given.max_draft_tokens,
            # In virtual time steps take seconds.
            max_wait_us=round(1e6 * given.max_wait_s),
        ),
    )


def _prediction(chance: random.Random) -> list[int]:
    """Some way on from the choice."""
    return [chance.choice((_AGAIN, _ANYWHERE)), *range(chance.randrange(_CHOICE), _WAY), _AGAIN, *range(_WAY)]


def _history(chance: random.Random) -> list[int]:
    """A prompt: two passes of the path and the start of a third. A match gives the first choice, later the second."""
    choices = [_AGAIN, _ANYWHERE]
    chance.shuffle(choices)
    return [*range(2, _WAY), choices[0], *range(chance.randrange(3, 5), _WAY), choices[1], 0]
