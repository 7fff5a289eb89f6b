"""Like `distribution`, with penalties and masks, whose state depends on the committed tokens; and faults of these.

The distribution of a token depends on all tokens before it. So each draw has its own expected distribution, computed
from the text by independent numpy code, and the sums are compared for each context.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from outrider.speculation import Candidate, LogitsOptions, LogitsProcessor, VerificationMode, propose, verify
from outrider.tree import DraftTree

from benchmarks.support.distribution import (
    DRAFT_TOKENS,
    SAMPLING,
    VOCAB,
    DistributionResult,
    Fault,
    Models,
    compare_counts,
)

_TEXT_TOKENS = 24
_PROMPT = (0, 1, 2, 3)
_STOP = 5


class Asked(enum.Enum):
    """The options of every text."""

    PENALTIES = LogitsOptions(presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.3)
    MASKS = LogitsOptions(
        logit_bias=((7, 1.5), (8, -2.0)),
        allowed_token_ids=tuple(range(VOCAB - 2)),
        bad_words=tuple((first, (first * 5 + 1) % VOCAB) for first in range(VOCAB)),
        min_tokens=12,
    )


@dataclass(slots=True)
class _Text:
    """One text of `_TEXT_TOKENS` tokens, round by round. Positions continue over all texts, so that noise differs."""

    models: Models
    mode: VerificationMode
    options: LogitsOptions
    start: int
    output: list[int] = field(default_factory=list)
    processor: LogitsProcessor = field(init=False)

    def __post_init__(self) -> None:
        self.processor = LogitsProcessor(self.options, _PROMPT, (), (_STOP,))

    def round(self) -> Candidate:
        # The draft does not apply the options.
        position, last = self.start + len(self.output), ([*_PROMPT, *self.output])[-1]
        drafted = []
        for offset in range(DRAFT_TOKENS):
            logits = self.models.draft[last : last + 1]
            drafted += propose(logits, [SAMPLING], [self.mode], [position + offset])
            last = drafted[-1].token_id
        draft = [each.token_id for each in drafted]
        q = tuple(each.q for each in drafted if each.q is not None)
        candidate = Candidate(SAMPLING, self.mode, DraftTree(position, tuple(draft), q=q), self.processor)
        before = ([*_PROMPT, *self.output])[-1]
        verify(self.models.target[[before, *draft]].clone(), [candidate])
        candidate.token_ids = candidate.token_ids[: _TEXT_TOKENS - len(self.output)]
        _commit(self.processor, candidate, draft)
        self.output += candidate.token_ids
        return candidate


def _commit(processor: LogitsProcessor, row: Candidate, draft: Sequence[int]) -> None:
    processor.advance(row.token_ids)


def run_options_experiment(
    asked: Asked, mode: VerificationMode, *, draws: int = 100_000, fault: Fault = Fault.NONE
) -> DistributionResult:
    """Emits about `draws` tokens and compares them with the target's own distribution under the options."""
    models = Models.make()
    logits = models.target.numpy().astype(np.float64)
    counts, wanted = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    verified = accepted = done = impossible = 0
    with _planted(fault):
        while done < draws:
            text = _Text(models, mode, asked.value, start=done)
            while len(text.output) < _TEXT_TOKENS:
                row = text.round()
                verified += row.num_verified
                accepted += row.num_accepted
            for at, token_id in enumerate(text.output):
                before = ([*_PROMPT, *text.output[:at]])[-1]
                expected = _expected(logits[before], asked.value, text.output[:at])
                counts[before, token_id] += 1
                wanted[before] += expected
                impossible += expected[token_id] == 0
            done += len(text.output)
    rows = counts.sum(1, keepdims=True)
    result = compare_counts(counts, wanted / np.maximum(rows, 1), mode, fault, accepted / max(verified, 1))
    return replace(result, p_value=0.0) if impossible else result


def _expected(logits: np.ndarray[Any, Any], options: LogitsOptions, output: Sequence[int]) -> np.ndarray[Any, Any]:
    """The target's distribution of the next token: options, then SAMPLING. Plain and slow."""
    found = logits.copy()
    for token_id, bias in options.logit_bias:
        found[token_id] += bias
    for token_id in {*_PROMPT, *output}:
        found[token_id] *= options.repetition_penalty if found[token_id] < 0 else 1 / options.repetition_penalty
    for token_id in set(output):
        found[token_id] -= options.frequency_penalty * output.count(token_id) + options.presence_penalty
    for token_id in range(VOCAB):
        if options.allowed_token_ids and token_id not in options.allowed_token_ids:
            found[token_id] = -np.inf
    if len(output) < options.min_tokens:
        found[_STOP] = -np.inf
    for *first, last in options.bad_words:
        if list(output[len(output) - len(first) :]) == first:
            found[last] = -np.inf
    probs = np.exp((found - found.max()) / SAMPLING.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= SAMPLING.top_p]] = 0
    return np.asarray(probs / probs.sum())


@contextmanager
def _planted(fault: Fault) -> Iterator[None]:
    """Plants the fault for the block."""
    shipped_commit = globals()["_commit"]
    if fault in _FAULTY_COMMITS:
        globals()["_commit"] = _FAULTY_COMMITS[fault]
    if fault is Fault.MASK_OF_ANOTHER_POSITION:
        Candidate.prefixes = _prefixes_one_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        globals()["_commit"] = shipped_commit
        Candidate.prefixes = _prefixes  # type: ignore[method-assign]


def _advance_by_steps(processor: LogitsProcessor, row: Candidate, draft: Sequence[int]) -> None:
    """Advances by one token per step, as if nothing was drafted."""
    processor.advance(row.token_ids[-1:])


def _count_rejected(processor: LogitsProcessor, row: Candidate, draft: Sequence[int]) -> None:
    processor.advance([*row.token_ids, *draft[row.num_accepted :]])


_FAULTY_COMMITS: dict[Fault, Callable[[LogitsProcessor, Candidate, Sequence[int]], None]] = {
    Fault.STATE_BY_STEPS: _advance_by_steps,
    Fault.REJECTED_COUNTED: _count_rejected,
}

_prefixes = Candidate.prefixes


def _prefixes_one_late(self: Candidate) -> Sequence[Sequence[int]]:
    """As if before each row the last drafted token were missing."""
    return [prefix[:-1] for prefix in _prefixes(self)]
