"""A draft model: one forward ingests the committed tokens and yields the first draft token, then one forward per token.

Keeps a KV cache per sequence that holds the committed tokens and the drafted ones beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.drafters.interface import Drafter
from outrider.drafters.rounds import DraftChain, plan_ingestion
from outrider.drafters.sequence import DraftSequence
from outrider.drafters.vocabulary import OwnVocabulary, Vocabulary
from outrider.drafting.config import ModelConfig
from outrider.engine import Engine, EngineSequence, Row
from outrider.speculation.warm_up import warm_up_proposals
from outrider.tree import DraftTree, common_len

SOURCE = "model"
_STAND_IN = 0


@dataclass(slots=True)
class _Run:
    """One sequence's part in a round."""

    sequence: DraftSequence
    kv: EngineSequence
    chain: DraftChain
    vocabulary: Vocabulary
    num_ids: int
    """That the model knows."""
    behind: bool = False
    """Whether this round had no room for all tokens that it has to ingest."""

    @property
    def next_position(self) -> int:
        """Absolute position of the next token of the chain."""
        return self.sequence.committed_len + len(self.chain)

    @property
    def lag(self) -> int:
        """Ids of the text and the chain whose KV is not cached yet."""
        return len(self.vocabulary.text(self.sequence)) + len(self.chain) - self.kv.cached_len

    def ingest(self, count: int) -> Row:
        """The next `count` uncached ids; only the very last one yields logits."""
        start, text = self.kv.cached_len, self.vocabulary.text(self.sequence)
        guessed = self.vocabulary.ids(self.chain.token_ids[max(0, start - len(text)) :])
        # The target may have sampled padding that this model does not have: it reads something else in its place.
        tokens = [i if i < self.num_ids else _STAND_IN for i in (*text[start:], *guessed)][:count]
        return Row(self.kv, tokens, 1 if count == self.lag else 0)


class ModelDrafter(Drafter):
    """Drafts with a causal language model on the engine.

    A sequence whose KV does not fit releases its blocks and does not draft in that round; the others do.
    """

    def __init__(
        self,
        engine: Engine,
        config: ModelConfig | None = None,
        vocabulary: Vocabulary | None = None,
        adapter_of: Callable[[str], int] = lambda tenant: -1,
    ) -> None:
        """`vocabulary`: of the model and its target; None: they have the same one, without padding. `adapter_of`: the
        number of a tenant's adapter in the engine."""
        self._adapter_of = adapter_of
        info = engine.info
        self._vocabulary = vocabulary or OwnVocabulary(info.vocab_size, token_map=engine.token_map)
        self.info = replace(info, vocab_size=self._vocabulary.size)
        self._engine = engine
        self._config = config or ModelConfig()
        self._kv: dict[DraftSequence, EngineSequence] = {}

    def check(self) -> None:
        self._engine.check()

    def warm_up(self) -> None:
        """As Engine.warm_up."""
        warm_up_proposals(self._engine.try_step(1), self._vocabulary.propose, self._config.others_looked_at)

    @property
    def num_free_blocks(self) -> int:
        return self._engine.kv.num_free_blocks

    def take_prefix_changes(self) -> tuple[list[bytes], list[bytes]]:
        changes = self._engine.kv.take_prefix_changes()
        return changes.added, changes.removed

    def on_open(self, sequence: DraftSequence) -> None:
        """Opens no KV: the first round that needs it does."""
        self._vocabulary.open(sequence)

    def on_commit(self, sequence: DraftSequence, known_len: int) -> None:
        """Cuts the KV back to the tokens that are committed or still drafted."""
        known = self._vocabulary.commit(sequence, known_len)
        kv = self._kv.get(sequence)
        if kv is None or kv.cached_len <= known:
            return
        text, guess = self._vocabulary.text(sequence), self._vocabulary.ids(_outstanding(sequence).guess())
        self._engine.kv.rewind(kv, known + common_len(kv.tokens[known:], [*text[known:], *guess]))

    def release(self, sequence: DraftSequence) -> None:
        kv = self._kv.pop(sequence, None)
        if kv is not None:
            self._engine.kv.close(kv)

    def on_close(self, sequence: DraftSequence) -> None:
        self.release(sequence)
        self._vocabulary.close(sequence)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        chains = [self._chain(sequence) for sequence in sequences]
        runs = self._admit([(s, c) for s, c in zip(sequences, chains, strict=True) if not c.ended])
        self._first_forward(runs)
        extending = [run for run in runs if not run.behind and not run.chain.ended]
        while extending:
            self._grow(extending, self._engine.forward([run.ingest(1) for run in extending]))
            extending = [run for run in extending if not run.chain.ended]
        behind = {run.sequence for run in runs if run.behind}
        most = self._config.num_alternatives
        return [None if s in behind else c.tree(most) for s, c in zip(sequences, chains, strict=True)]

    def _chain(self, sequence: DraftSequence) -> DraftChain:
        room = self._room(sequence)
        least = max(self._config.min_confidence, sequence.limits.min_chance)
        return DraftChain(_outstanding(sequence).upto(room), room, least, sequence.spec.stop_token_ids)

    def _room(self, sequence: DraftSequence) -> int:
        if not self._vocabulary.whole(sequence):
            return 0
        return max(0, min(sequence.room, self.info.max_context_len - len(self._vocabulary.text(sequence))))

    def _admit(self, growing: list[tuple[DraftSequence, DraftChain]]) -> list[_Run]:
        """The runs of the sequences whose whole round fits into the free KV blocks."""
        known = self._vocabulary, self._engine.info.vocab_size
        runs = [_Run(sequence, self._kv_of(sequence, chain), chain, *known) for sequence, chain in growing]
        admitted: list[_Run] = []
        # The last token of a chain is never run.
        needs = [self._engine.kv.blocks_needed(r.kv, r.lag + r.chain.wanted - len(r.chain) - 1) for r in runs]
        free = self._engine.kv.num_free_blocks
        for run, needed in zip(runs, needs, strict=True):
            if needed <= free:
                free -= needed
                admitted.append(run)
            else:
                self.release(run.sequence)
        return admitted

    def _kv_of(self, sequence: DraftSequence, chain: DraftChain) -> EngineSequence:
        kv, text = self._kv.get(sequence), self._vocabulary.text(sequence)
        if kv is None:
            kv = self._kv[sequence] = self._engine.kv.open(text, sequence.spec.salt)
            kv.adapter = self._adapter_of(sequence.spec.tenant)
        # The last token is run again if it was run before: its logits give the chain's next token.
        self._engine.kv.rewind(kv, len(text) + len(chain) - 1)
        return kv

    def _first_forward(self, runs: list[_Run]) -> None:
        counts = plan_ingestion([run.lag for run in runs], self._config)
        for run, count in zip(runs, counts, strict=True):
            run.behind = count < run.lag
        rows = [run.ingest(count) for run, count in zip(runs, counts, strict=True) if count]
        if not rows:
            return
        logits = self._engine.forward(rows)
        for run in runs:
            # One short of the end: a published block cannot be cut, and the last token may be run again.
            self._engine.kv.publish(run.kv, len(self._vocabulary.text(run.sequence)) - 1)
        self._grow([run for run in runs if not run.behind], logits)

    def _grow(self, runs: list[_Run], logits: Tensor) -> None:
        """Adds each chain's next token, from `logits` [len(runs), width]."""
        if not runs:
            return
        specs = [run.sequence.spec for run in runs]
        proposals = self._vocabulary.propose(
            logits,
            [spec.params for spec in specs],
            [spec.mode for spec in specs],
            [run.next_position for run in runs],
            self._config.others_looked_at,
        )
        for run, proposal in zip(runs, proposals, strict=True):
            run.chain.add(proposal)


def _outstanding(sequence: DraftSequence) -> DraftTree:
    """What is still valid of this model's last proposal. A draft of another source is not continued."""
    return sequence.guess if sequence.guess.source == SOURCE else DraftTree(sequence.committed_len, source=SOURCE)
