"""What a draft model prepares while its guess is judged: a continuation for each likely outcome.

A third of all steps end in a token that the draft did not guess but thought likely. Where the target already holds what
follows it, its next step begins at once, without a round trip. One forward ranks what may come; each one after it grows
all continuations by a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.drafters.config import ModelConfig
from outrider.drafters.outcomes import Outcome, likely_outcomes
from outrider.drafters.rounds import Chain
from outrider.drafters.sequence import Drafted, DraftSequence
from outrider.engine import Engine, EngineSequence, OutOfBlocks, Row
from outrider.speculation import likeliest, propose

# A forward each. Proposals are two and a half tokens long on average, and what comes later may come as drafts do.
_MAX_AFTER = 3
# Tokens looked at in each position for what the target may say there.
_RANKED = 4


@dataclass(slots=True)
class _Branch:
    """One outcome, and what is guessed after it."""

    outcome: Outcome
    kv: EngineSequence
    """Everything before the outcome's own token at first."""
    chain: Chain

    def row(self) -> Row:
        """Its last token: the outcome's at first, then that of the chain."""
        tokens = self.chain.drafted.token_ids
        return Row(self.kv, tokens[-1:] or [self.outcome.token_id], 1)


@dataclass(slots=True)
class _Branches:
    """All that is being prepared for one sequence."""

    guess: Drafted
    all: list[_Branch]

    @property
    def growing(self) -> list[_Branch]:
        return [branch for branch in self.all if not branch.chain.ended]

    def paths(self, num_siblings: int) -> tuple[Drafted, ...]:
        """The guess first, as far as its own branch has made it, then the paths that leave it; empty if none is new."""
        guess, others = replace(self.guess, siblings=self.guess.siblings[:num_siblings]), []
        grown = False
        for branch in self.all:
            branch.chain.take_siblings(num_siblings)
            drafted, count = branch.chain.drafted, branch.outcome.num_accepted
            if not drafted.token_ids:
                continue
            path = Drafted(
                drafted.source,
                [*self.guess.token_ids[:count], branch.outcome.token_id, *drafted.token_ids],
                [*_confidence(self.guess, count), branch.outcome.confidence, *drafted.confidence],
                siblings=[one._replace(at=one.at + count + 1) for one in drafted.siblings],
            )
            if count == len(self.guess.token_ids) and not grown:
                # The likeliest outcome of all being accepted is what the guess itself goes on with.
                guess, grown = replace(path, siblings=[*guess.siblings, *path.siblings]), True
            else:
                others.append(path)
        return (guess, *others) if others or grown else ()


class Brancher:
    """Prepares, forward by forward, on KV forked from the sequences' own, which are not rewound meanwhile."""

    def __init__(
        self, engine: Engine, config: ModelConfig, kv: Mapping[DraftSequence, EngineSequence], source: str
    ) -> None:
        """`kv`: the sequences' own, as they stand. `source`: whose guesses these are."""
        self._engine = engine
        self._config = config
        self._kv = kv
        self._source = source
        self._prepared: dict[DraftSequence, _Branches] = {}

    def branch(self, sequences: Sequence[DraftSequence]) -> list[tuple[Drafted, ...] | None]:
        """As Drafter.branch. One forward for all of them: of a whole guess, or of a token of each branch."""
        beginning = [s for s in sequences if s not in self._prepared and self._may_begin(s)]
        growing = [(s, b) for s in sequences if (prepared := self._prepared.get(s)) for b in prepared.growing]
        try:
            self._forward(beginning, growing)
        except OutOfBlocks:
            # Others need the room for what is being judged.
            for sequence in sequences:
                self.give_up(sequence)
        return [self._finished(sequence) for sequence in sequences]

    def give_up(self, sequence: DraftSequence) -> None:
        """Forgets what is being prepared for it, if anything is."""
        prepared = self._prepared.pop(sequence, None)
        if prepared is not None:
            for branch in prepared.all:
                self._engine.close(branch.kv)

    def give_up_all(self) -> None:
        for sequence in list(self._prepared):
            self.give_up(sequence)

    def _forward(self, beginning: list[DraftSequence], growing: list[tuple[DraftSequence, _Branch]]) -> None:
        rows = [self._guess_row(sequence) for sequence in beginning]
        if not rows and not growing:
            return
        logits = self._engine.forward([*rows, *(branch.row() for _, branch in growing)])
        at = 0
        for row, sequence in zip(rows, beginning, strict=True):
            self._begin(sequence, logits[at : at + row.num_logits])
            at += row.num_logits
        if growing:
            self._grow(growing, logits[at:])

    def _may_begin(self, sequence: DraftSequence) -> bool:
        """Whether it stands ready: hardly behind, and with room for what a step of the target may say."""
        kv, guess = self._kv.get(sequence), sequence.guess.token_ids
        if not sequence.wants_alternatives or kv is None or not guess:
            return False
        most = sequence.committed_len + len(guess) + sequence.max_draft_tokens + 1
        lag = sequence.committed_len + len(guess) - kv.cached_len
        return most <= self._engine.info.max_context_len and lag <= self._config.ready_lag + sequence.max_draft_tokens

    def _guess_row(self, sequence: DraftSequence) -> Row:
        """All that the target's step may accept, with logits for each position where it may end."""
        kv, guessed = self._kv[sequence], sequence.guess.token_ids[: sequence.max_draft_tokens]
        self._engine.rewind(kv, sequence.committed_len - 1)
        return Row(kv, [*sequence.tokens[kv.cached_len :], *guessed], len(guessed) + 1)

    def _begin(self, sequence: DraftSequence, logits: Tensor) -> None:
        """`logits` [positions judged + 1, width]."""
        opening, length, guess = sequence.opening, sequence.committed_len, sequence.guess
        positions = range(length, length + len(logits))
        ranked = likeliest(logits, opening.params, opening.mode, positions, _RANKED, self._engine.token_map)
        own = guess.source == self._source
        outcomes = [
            outcome
            for outcome in likely_outcomes(guess.token_ids, ranked, sequence.num_alternatives, own=own)
            if outcome.token_id not in opening.stop_token_ids and _wanted_after(sequence, outcome)
        ]
        forks = self._engine.fork(self._kv[sequence], [length + outcome.num_accepted for outcome in outcomes])
        least, stops = self._config.min_confidence, opening.stop_token_ids
        chains = [Chain(Drafted(self._source), _wanted_after(sequence, o), least, stops) for o in outcomes]
        self._prepared[sequence] = _Branches(guess, list(map(_Branch, outcomes, forks, chains)))

    def _grow(self, growing: list[tuple[DraftSequence, _Branch]], logits: Tensor) -> None:
        """Each branch's next token, from `logits` [branches, width]."""
        proposals = propose(
            logits,
            [sequence.opening.params for sequence, _ in growing],
            [sequence.opening.mode for sequence, _ in growing],
            [branch.kv.cached_len for _, branch in growing],
            token_map=self._engine.token_map,
            num_others=self._config.others_looked_at,
        )
        for (_, branch), proposal in zip(growing, proposals, strict=True):
            branch.chain.add(proposal)

    def _finished(self, sequence: DraftSequence) -> tuple[Drafted, ...] | None:
        prepared = self._prepared.get(sequence)
        if prepared is None:
            return ()
        if prepared.growing:
            return None
        self.give_up(sequence)
        return prepared.paths(self._config.num_siblings)


def _confidence(guess: Drafted, count: int) -> list[float]:
    return guess.confidence[:count] if guess.confidence else [1.0] * count


def _wanted_after(sequence: DraftSequence, outcome: Outcome) -> int:
    """Tokens worth guessing after an outcome."""
    return max(0, min(_MAX_AFTER, sequence.max_draft_tokens, sequence.reach - outcome.num_accepted - 1))
