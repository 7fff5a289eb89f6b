"""One sequence's part of a step: planned, drafted, verified, committed. Each stage fills in its fields."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from outrider.limits import to_us
from outrider.options.logprobs import TokenLogprobs
from outrider.protocol.rounds import SourceTokens
from outrider.sequence.key import Finish, SequenceKey
from outrider.speculation.candidates import Candidate
from outrider.target.requests.times import Times
from outrider.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.rpc.v1.sequence_pb2 import DraftStats

S = TypeVar("S")


@dataclass(slots=True, eq=False, kw_only=True)
class StepRow(Candidate, Generic[S]):
    """What follows from it is found by who asks, and not by the step thread.

    Its tokens are those it commits: accepted drafts, then the target's own token unless the sequence ends before it.
    Without `decides`, it has neither a draft nor any.
    """

    sequence: S
    """The engine's own object; only the step thread looks at it."""
    key: SequenceKey
    base_len: int
    """Committed length before the step."""
    start: int = 0
    """Position of the first token that is run."""
    num_tokens: int = 1
    """Committed tokens that are run."""
    decides: bool = True
    """Whether all of them are run, so that the row is verified. Otherwise it is a chunk of prefill."""
    decodes: bool = True
    """Whether it runs one committed token, and so nothing of a prompt."""
    times: Times = field(default_factory=Times)
    """Since the last commit. A row's share is known only after the step."""

    raised: bool = False
    """Whether the model raised the error when it ran this row alone, without its draft."""
    states: Tensor | None = None
    """[tokens, layers · width]: the hidden states that were asked for, from `start` on; after the run only those of
    committed positions."""

    finish: Finish = Finish.NONE
    num_dropped: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the opening; 0 after its first commit."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; 0 after the first commit."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One per committed token, when the request asks for them; `top` has them for samples too."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    sources: Sequence[SourceTokens] = ()
    """What came of the drafted tokens, by source."""
    draft_stats: DraftStats | None = None
    """What the router is told of the draft worker with the commit."""

    def until_end(self, stop_token_ids: AbstractSet[int], remaining: int) -> None:
        """Cuts its tokens after the first stop token, which is kept, or after `remaining` tokens, whichever comes
        first. One by one, so that a stop inside accepted drafts is exact."""
        tokens = self.token_ids
        if len(tokens) >= remaining or not stop_token_ids.isdisjoint(tokens):
            for count, token in enumerate(tokens, start=1):
                if token in stop_token_ids:
                    self.finish = Finish.STOP
                elif count == remaining:
                    self.finish = Finish.LENGTH
                if self.finish is not Finish.NONE:
                    if count < len(tokens):
                        self.num_verified = min(count, len(self.accepted))
                    self.token_ids, self.accepted = tokens[:count], self.accepted[:count]
                    break

    def stepped(self) -> None:
        """Lets go of what only the step needs: whoever keeps a report would keep the sequence and its grammar too."""
        self.sequence = self.processor = None  # type: ignore[assignment]

    def drop_draft(self) -> None:
        """Runs the committed tokens alone."""
        self.draft = DraftTree(self.base_len)

    @property
    def num_run(self) -> int:
        return self.num_tokens + len(self.draft.token_ids)

    @property
    def num_prefilled(self) -> int:
        """Of the tokens that are run, those of a prompt. The others decode or verify."""
        return 0 if self.decodes else self.num_tokens

    @property
    def num_drafted(self) -> int:
        return self.draft.depth

    @property
    def num_wasted(self) -> int:
        """Drafted tokens that were verified and not accepted."""
        return len(self.draft.token_ids) - len(self.accepted) if self.token_ids else 0

    @property
    def rejected(self) -> list[int]:
        """The drafted tokens of the longest path in the step, after as many as were accepted; without those that are
        not known."""
        found = [self.draft.token_ids[node] for node in self.draft.longest()[len(self.accepted) :]]
        return [token_id for token_id in found if token_id >= 0]

    @property
    def num_branch_tokens(self) -> int:
        """Draft tokens in the step beyond those of the longest path."""
        return len(self.draft) - self.draft.depth

    @property
    def draft_useful_s(self) -> float:
        """Draft time spent on the accepted tokens."""
        return sum(map(self.draft.seconds_of, self.accepted))

    @property
    def verified(self) -> Sequence[int]:
        """The nodes that were verified: at each position, all that follow the accepted one before. First those
        accepted."""
        if not self.draft.parents:
            return range(min(self.num_verified, len(self.draft.token_ids)))
        children = self.draft.children()
        nodes = (node for parent in [ROOT, *self.accepted][: self.num_verified] for node in children[parent + 1])
        return sorted(nodes, key=lambda node: node not in self.accepted)

    def count_sources(self, verified: Sequence[int]) -> None:
        """Fills in its sources, of which these nodes were verified."""
        draft = self.draft
        if not draft.token_ids:
            return
        if not draft.origins:
            # Most drafts are one source's.
            own = not draft.serial
            totals = len(draft.token_ids), len(verified), len(self.accepted), to_us(draft.seconds) if own else 0
            self.sources = [SourceTokens(draft.source, own, *totals)]
            return
        sources = _sources(draft)
        of_verified = [sources[node] for node in verified]
        accepted = [sources[node] for node in self.accepted]
        self.sources = [
            SourceTokens(
                *one, sources.count(one), of_verified.count(one), accepted.count(one), _own_us(draft, sources, one)
            )
            for one in dict.fromkeys(sources)
        ]

    @property
    def _shown(self) -> list[int]:
        """The nodes that a commit tells of: the accepted ones, then the others of the longest path."""
        return [*self.accepted, *self.draft.longest()[len(self.accepted) :]]

    @property
    def token_sources(self) -> list[int]:
        """For each token that a commit tells of, the place of its source in `sources`."""
        sources = _sources(self.draft)
        names = list(dict.fromkeys(sources))
        return [names.index(sources[node]) for node in self._shown]

    @property
    def chances(self) -> bytes:
        """For the same tokens: the chance that the source gave each, in 255ths."""
        claims = self.draft.claims()
        return bytes(min(255, round(255 * claims[node])) for node in self._shown)


def _own_us(draft: DraftTree, sources: Sequence[tuple[str, bool]], source: tuple[str, bool]) -> int:
    """A draft worker says itself what its drafts took."""
    _, own = source
    return to_us(sum(draft.seconds_of(node) for node, each in enumerate(sources) if each == source)) if own else 0


def _sources(draft: DraftTree) -> list[tuple[str, bool]]:
    """Of each node. Messages of draft workers are numbered from 1 on."""
    return [(origin.source, not origin.serial) for origin in map(draft.origin, range(len(draft)))]
