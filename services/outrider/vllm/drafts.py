"""The drafts of the requests that are open in one vLLM engine: what is buffered, what it is worth, what came of it.

Knows neither vLLM nor routers. Used on the thread that schedules. vLLM verifies chains, so of a tree the best path is
taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider.drafting.buffer import DraftBuffer
from outrider.drafting.tree import ROOT, DraftTree
from outrider.errors import InvalidRequest
from outrider.target.calibration import Bin, Calibration, Fit, bin_at
from outrider.target.opening import Speculation
from outrider.worker.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class Decoding:
    """A request that takes one token in the next step, and may take drafted ones with it."""

    request_id: str
    num_tokens: int
    """Committed tokens, the prompt included."""
    room: int
    """Most drafted tokens, by the request's own limits."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a step has left for drafted tokens."""

    tokens: int
    blocks: int
    """Free blocks of the KV cache beyond those that the committed tokens need: drafts never preempt."""
    block_size: int


@dataclass(frozen=True, slots=True)
class Judged:
    """What one step did with a request's drafted tokens."""

    num_drafted: int = 0
    num_verified: int = 0
    """Positions verified that count: up to the end of the text, or to the first rejection."""
    num_accepted: int = 0
    rejected: tuple[int, ...] = ()
    num_dropped: int = 0
    """Drafted tokens that came late or did not fit, since the last commit."""
    draft_serial: int = 0
    """Number of the message that brought the last of them."""
    draft_useful_s: float = 0.0
    """Draft time spent on the accepted ones."""


@dataclass(slots=True)
class OpenRequest:
    """One request."""

    tokens: Sequence[int]
    """Prompt and committed output. It grows as the engine commits."""
    speculation: Speculation
    fit: Fit
    num_possible: Callable[[list[int]], int]
    """How many of some drafted tokens a grammar lets through."""
    buffer: DraftBuffer = field(default_factory=DraftBuffer)
    placed: DraftTree | None = None
    """The chain of the step at hand."""

    def best_path(self, calibration: Calibration, room: int) -> tuple[DraftTree | None, list[float]]:
        """Of all that is buffered the chain of likeliest tokens, and what each is worth: weight times the chance that
        it and all before it are accepted."""
        limit, tree = max(0, min(self.speculation.max_draft_tokens, room)), self.buffer.merged()
        if tree is None or not limit:
            return None, []
        nodes, values, children, joint = list[int](), list[float](), tree.children(), 1.0
        while len(nodes) < limit and (following := children[(nodes[-1] if nodes else ROOT) + 1]):
            chances = {node: calibration.own(bin_at(tree, node, len(nodes) + 1), self.fit) for node in following}
            nodes.append(max(chances, key=chances.__getitem__))
            joint *= chances[nodes[-1]]
            values.append(self.speculation.weight * joint)
        return tree.take(nodes), values

    def cut_impossible(self) -> None:
        if self.buffer.trees:
            self.buffer.keep(self._possible)

    def _possible(self, tree: DraftTree) -> DraftTree:
        kept = set[int]()
        for path in tree.paths():
            kept.update(path[: self.num_possible([tree.token_ids[node] for node in path])])
        return tree if len(kept) == len(tree) else tree.take(sorted(kept))


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
            found.buffer.limit(speculation.capacity)

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
        found.buffer.offer(draft, found.tokens, found.speculation.capacity)
        found.cut_impossible()

    def choose(self, decoding: Iterable[Decoding], room: Room) -> dict[str, list[int]]:
        """The drafted tokens that the next step verifies: the most valuable first, as long as one is worth its row."""
        price, tokens, blocks = self.row_price, room.tokens, room.blocks
        chains: dict[str, DraftTree] = {}
        values: dict[str, list[float]] = {}
        counts: dict[str, int] = {}
        queue: list[tuple[float, str, int]] = []
        for one in decoding:
            if (found := self._open.get(one.request_id)) is None:
                continue
            chain, chain_values = found.best_path(self.calibration, one.room)
            if chain is not None and chain_values:
                chains[one.request_id], values[one.request_id] = chain, chain_values
                heapq.heappush(queue, (-chain_values[0], one.request_id, one.num_tokens))
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
            if count < len(values[request_id]):
                heapq.heappush(queue, (-values[request_id][count], request_id, position + 1))
        for request_id, count in counts.items():
            self._open[request_id].placed = chains[request_id].upto(count)
        return {request_id: list(chains[request_id].token_ids[:count]) for request_id, count in counts.items()}

    def committed(self, request_id: str, token_ids: Sequence[int], drafted: Sequence[int], *, finished: bool) -> Judged:
        """Follows a commit, in a step that verified these drafted tokens."""
        num_accepted = _equal(token_ids, drafted)
        ended = finished and num_accepted == len(token_ids)
        num_verified = num_accepted + (num_accepted < len(drafted) and not ended)
        if (found := self._open.get(request_id)) is None:
            return Judged(len(drafted), num_verified, num_accepted, tuple(drafted[num_accepted:]))
        placed, found.placed = found.placed, None
        # What the engine could not take of it is not in `drafted`.
        draft = placed.upto(len(drafted)) if placed is not None and drafted else DraftTree(0)
        bins = [bin_at(draft, node, node + 1) for node in range(min(num_verified, len(draft)))]
        self._observe(bins, num_accepted, found.fit)
        found.buffer.advance(token_ids, len(drafted))
        found.cut_impossible()
        return Judged(
            num_drafted=len(drafted),
            num_verified=num_verified,
            num_accepted=num_accepted,
            rejected=tuple(drafted[num_accepted:]),
            num_dropped=found.buffer.take_num_dropped(),
            draft_serial=max((draft.origin(node).serial for node in range(len(draft))), default=0),
            draft_useful_s=sum(draft.seconds_of(node) for node in range(min(num_accepted, len(draft)))),
        )

    def _observe(self, bins: Sequence[Bin], num_accepted: int, fit: Fit) -> None:
        self.calibration.observe([(each, number < num_accepted) for number, each in enumerate(bins)], fit)

    def stepped(self, *, rows: int, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """One step of the engine: its rows that decode or verify, its prompt tokens, the tokens that it committed."""
        self.calibration.stepped()
        self.cost.took(rows=rows, seconds=seconds, tokens=tokens, prompt_tokens=prompt_tokens)


def _equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the start are equal."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
