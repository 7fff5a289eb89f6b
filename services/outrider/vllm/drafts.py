"""The drafts of the requests that are open in one vLLM engine: what is buffered, what it is worth, what came of it.

Knows neither vLLM nor routers. Used on the thread that schedules. vLLM verifies chains: of all that is proposed for a
request, merged to one tree, the path is taken of which most tokens are expected to be accepted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.drafting.buffer import DraftBuffer
from outrider.drafting.speculation import Speculation
from outrider.errors import InvalidRequest
from outrider.protocol.sequence_key import Finish, SequenceKey
from outrider.target.requests.by_source import tokens_by_source
from outrider.target.requests.commit import Outcome
from outrider.target.requests.report import Committed
from outrider.target.requests.times import Times
from outrider.target.step.calibration import Calibration, Fit, bin_at, bins_of
from outrider.tree import ROOT, DraftTree, common_len
from outrider.worker.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Decoding:
    """A request that takes one token in the next step, and may take drafted ones with it."""

    request_id: str
    num_tokens: int
    """Committed tokens, the prompt included."""
    room: int
    """Most drafted tokens, by the request's own limits."""
    num_ahead: int = 0
    """Tokens that a running step may commit: a draft begins before them."""


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What a step has left for drafted tokens."""

    tokens: int
    blocks: int
    """Free blocks of the KV cache beyond those that the committed tokens need: drafts never preempt."""
    block_size: int


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """What one step did with a request's drafted tokens."""

    draft: DraftTree = field(default_factory=lambda: DraftTree(0))
    """The chain."""
    num_verified: int = 0
    """Positions verified that count: up to the end of the text, or to the first rejection."""
    num_accepted: int = 0
    num_dropped: int = 0
    """Tokens of draft workers that came late or did not fit, since the last commit."""

    def committed(
        self, key: SequenceKey, base_len: int, token_ids: list[int], finish: Finish, times: Times, **more: Any
    ) -> Committed:
        """What the step commits. `more`: further fields of Committed."""
        accepted = range(self.num_accepted)
        return Committed(
            key=key,
            base_len=base_len,
            outcome=Outcome(token_ids, len(self.draft), self.num_verified, self.num_accepted, finish),
            draft=self.draft,
            accepted=accepted,
            num_dropped=self.num_dropped,
            times=times,
            sources=tokens_by_source(self.draft, accepted, range(self.num_verified)),
            **more,
        )


@dataclass(slots=True)
class OpenRequest:
    tokens: Sequence[int]
    """Prompt and committed output. It grows as the engine commits."""
    speculation: Speculation
    fit: Fit
    num_possible: Callable[[list[int]], int]
    """How many of some drafted tokens a grammar lets through."""
    buffer: DraftBuffer = field(default_factory=DraftBuffer)

    def best_path(
        self, calibration: Calibration, room: int, num_ahead: int = 0
    ) -> tuple[DraftTree | None, list[float]]:
        """Of all that is buffered the chain of which most tokens are expected to be accepted, and what each is worth:
        weight times the chance that it and all before it are accepted. The first `num_ahead` tokens count for nothing:
        they are what a running step should commit."""
        tree = self.buffer.merged()
        if tree is None:
            return None, []
        limit = num_ahead + min(room, max(self.speculation.max_draft_tokens, self.speculation.max_own_draft_tokens))
        joint, expected = {ROOT: 1.0}, {ROOT: 0.0}
        for node, depth in enumerate(tree.depths()):
            if depth <= limit:
                parent = tree.parent(node)
                joint[node] = joint[parent] * calibration.own(bin_at(tree, node, depth), self.fit)
                expected[node] = expected[parent] + (joint[node] if depth > num_ahead else 0.0)
        path = tree.path(max(expected, key=expected.__getitem__))
        return tree.take(path), [self.speculation.weight * joint[node] for node in path[num_ahead:]]

    def cut_impossible(self) -> None:
        if self.buffer.trees:
            self.buffer.keep(self._possible)

    def _possible(self, tree: DraftTree) -> DraftTree:
        kept = set[int]()
        for path in tree.paths():
            kept.update(path[: self.num_possible([tree.token_ids[node] for node in path])])
        return tree if len(kept) == len(tree) else tree.take(sorted(kept))


_NOTHING = VerifiedDraft()


def _verified(chain: DraftTree, tokens: Sequence[int], committed: Sequence[int], count: int) -> DraftTree:
    """What a step that committed the last of `tokens` has verified of the chain: its tokens after those that the steps
    before committed. Empty if these are not in it: the rows were of no use."""
    before = len(tokens) - len(committed)
    left = chain.after(tokens[chain.base_len : before]) if chain.base_len <= before else None
    return DraftTree(before) if left is None else left.upto(count)


def _all(token_ids: list[int]) -> int:
    return len(token_ids)


class DraftBook:
    """The drafts of all open requests of one engine, and what their rows cost."""

    def __init__(self, vocab_size: int, row_price: Callable[[StepCost], float] = lambda cost: cost.price) -> None:
        """`row_price`: the least chance at which a drafted token is verified, as a function of measured step costs."""
        self.cost = StepCost()
        self.calibration = Calibration()
        self._vocab_size = vocab_size
        self._row_price = row_price
        self._open: dict[str, OpenRequest] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def row_price(self) -> float:
        """Price of one more row in a step, as a chance."""
        return self._row_price(self.cost)

    def find(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def open(
        self,
        request_id: str,
        tokens: Sequence[int],
        speculation: Speculation,
        tenant: str = "",
        num_possible: Callable[[list[int]], int] = _all,
    ) -> None:
        self._open[request_id] = OpenRequest(tokens, speculation, self.calibration.fit(tenant), num_possible)

    def adjust(self, request_id: str, speculation: Speculation) -> None:
        if (found := self._open.get(request_id)) is not None:
            found.speculation = speculation
            found.buffer.limit(speculation.max_draft_tokens, speculation.max_own_draft_tokens)

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def clear(self) -> None:
        """Forgets all drafts: the open requests are decoded plainly to their ends."""
        self._open.clear()

    def offer(self, request_id: str, draft: DraftTree) -> None:
        """Buffers what is useful of a draft worker's tree.

        Raises InvalidRequest for ids beyond the vocabulary: for them a GPU would read memory that is not the
        embedding's.
        """
        if (found := self._open.get(request_id)) is None:
            return
        if not all(0 <= token_id < self._vocab_size for token_id in draft.token_ids):
            raise InvalidRequest("draft.token_ids", "a token id is outside the vocabulary")
        found.buffer.offer(draft, found.tokens, found.speculation.max_draft_tokens)
        found.cut_impossible()

    def put(self, request_id: str, tree: DraftTree) -> None:
        """Buffers a tree that was made in this process."""
        if (found := self._open.get(request_id)) is not None:
            found.buffer.put(tree, len(found.tokens), found.speculation.max_own_draft_tokens)
            found.cut_impossible()

    def awaits(self, request_id: str) -> bool:
        """Whether a draft worker owes an answer to the last commit, and may be worth its row and more than what was
        looked up."""
        found = self._open.get(request_id)
        if found is None or not found.buffer.active or found.buffer.has_answer(len(found.tokens)):
            return False
        _, looked_up = found.best_path(self.calibration, 1)
        value = found.speculation.weight * self.calibration.best(found.fit)
        return value >= self.row_price and value > max(looked_up, default=0.0)

    def choose(self, decoding: Iterable[Decoding], room: StepRoom) -> list[tuple[Decoding, DraftTree]]:
        """The chains of which the next step verifies the tokens after those that a running one commits: the most
        valuable first, as long as one is worth its row."""
        price, tokens, blocks = self.row_price, room.tokens, room.blocks
        chains: dict[str, tuple[Decoding, DraftTree, list[float]]] = {}
        counts: dict[str, int] = {}
        queue: list[tuple[float, str, int]] = []
        for one in decoding:
            if (found := self._open.get(one.request_id)) is None:
                continue
            chain, values = found.best_path(self.calibration, one.room, one.num_ahead)
            if chain is not None and values:
                chains[one.request_id] = one, chain, values
                heapq.heappush(queue, (-values[0], one.request_id, one.num_tokens + one.num_ahead))
        while queue and tokens:
            value, request_id, position = heapq.heappop(queue)
            # Written so that NaN is worth nothing.
            if not -value >= price:
                break
            # The token at this position opens a block of its own.
            needs = position % room.block_size == 0
            if needs > blocks:
                continue
            tokens, blocks = tokens - 1, blocks - needs
            count = counts[request_id] = counts.get(request_id, 0) + 1
            if count < len(values := chains[request_id][2]):
                heapq.heappush(queue, (-values[count], request_id, position + 1))
        found_: list[tuple[Decoding, DraftTree]] = []
        for request_id, count in counts.items():
            one, chain, _ = chains[request_id]
            found_.append((one, chain.upto(one.num_ahead + count)))
        return found_

    def committed(
        self, request_id: str, token_ids: Sequence[int], chain: DraftTree | None, num_drafted: int, *, finished: bool
    ) -> VerifiedDraft:
        """Follows a commit, in a step that verified so many tokens of this chain."""
        found = self._open.get(request_id)
        if chain is None and (found is None or not found.buffer.trees):
            return _NOTHING if found is None else VerifiedDraft(num_dropped=found.buffer.take_num_dropped())
        draft = (
            DraftTree(0) if chain is None or found is None else _verified(chain, found.tokens, token_ids, num_drafted)
        )
        num_accepted = common_len(token_ids, draft.token_ids)
        ended = finished and num_accepted == len(token_ids)
        num_verified = num_accepted + (num_accepted < len(draft) and not ended)
        if found is None:
            return VerifiedDraft(draft, num_verified, num_accepted)
        verdicts = [(each, node < num_accepted) for node, each in enumerate(bins_of(draft)[:num_verified])]
        self.calibration.observe(verdicts, found.fit)
        found.buffer.advance(token_ids, len(draft))
        found.cut_impossible()
        return VerifiedDraft(draft, num_verified, num_accepted, found.buffer.take_num_dropped())

    def stepped(self, *, rows: int, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """One step of the engine: its rows that decode or verify, its prompt tokens, the tokens that it committed."""
        self.calibration.stepped()
        self.cost.took(rows=rows, seconds=seconds, tokens=tokens, prompt_tokens=prompt_tokens)
