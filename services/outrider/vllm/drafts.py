"""The drafts of the requests that are open in one vLLM engine: what is buffered, what it is worth, what came of it.

Knows neither vLLM nor routers. Used on the thread that schedules. vLLM verifies chains: of all that is proposed for a
request, merged to one tree, the path is taken of which most tokens are expected to be accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import Any

from outrider.sequence.key import Finish
from outrider.sequence.speculation import Speculation
from outrider.target.drafts.calibration import Bin, Calibration, bin_at, bins_of
from outrider.target.drafts.choice import Pricing, StepRoom, take_drafts
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.row import StepRow
from outrider.tree import ROOT, DraftTree, common_len
from outrider.worker.step_cost import StepCost

log = logging.getLogger(__name__)

_NO_DRAFT = DraftTree(0)
_QUIET_S = 60.0
"""Between two lines about faults: what fails in one step fails in the next too."""


@dataclass(slots=True)
class ChainRow:
    """One request's part of a step: what may be drafted, the chain that is verified, what came of it. Each stage fills
    in its fields."""

    request_id: str = ""
    base_len: int = 0
    """Committed length when it was planned: `token_ids` begin there."""
    room: int = 0
    """Most drafted tokens, by the request's own limits."""
    num_ahead: int = 0
    """Tokens that a running step may commit: those of `token_ids` that come before the ones to verify."""

    tree: DraftTree | None = None
    """The chain, as it is buffered. It may begin before `base_len`."""
    count: int = 0
    """Tokens that the step verifies, after those ahead."""

    first: int = 0
    """Of the chain's tokens the first that was verified."""
    num_drafted: int = 0
    """Tokens verified from there on: none if the step before has committed something else."""
    num_verified: int = 0
    """Positions verified that count: up to the end of the text, or to the first rejection."""
    num_accepted: int = 0
    num_dropped: int = 0
    """Tokens of draft workers that came late or did not fit, since the last commit."""

    @property
    def token_ids(self) -> Sequence[int]:
        """From `base_len` on, with those ahead."""
        assert self.tree is not None
        first = self.base_len - self.tree.base_len
        return self.tree.token_ids[first : first + self.num_ahead + self.count]

    @property
    def left(self) -> DraftTree:
        """Those to verify."""
        assert self.tree is not None
        first = self.base_len - self.tree.base_len + self.num_ahead
        return self.tree.part(first, first + self.count)

    @property
    def draft(self) -> DraftTree:
        return _NO_DRAFT if self.tree is None else self.tree.part(self.first, self.first + self.num_drafted)

    def fill(self, row: StepRow[Any], token_ids: Sequence[int], finish: Finish) -> None:
        """What the step commits."""
        row.token_ids, row.finish = token_ids, finish
        row.draft, row.accepted, row.num_verified = self.draft, range(self.num_accepted), self.num_verified
        row.num_dropped = self.num_dropped


NOTHING = ChainRow()


def best_path(drafts: SequenceDrafts, calibration: Calibration, depth: int, num_ahead: int) -> DraftTree | None:
    """Of all that is buffered the chain of which most tokens are expected to be accepted in the first `depth`
    positions. The first `num_ahead` tokens count for nothing: a running step should commit them."""
    tree = drafts.buffer.merged()
    if tree is None or not tree.parents:
        return tree
    joint, expected = {ROOT: 1.0}, {ROOT: 0.0}
    for node, each in enumerate(tree.depths()):
        if each <= depth:
            parent = tree.parent(node)
            joint[node] = joint[parent] * calibration.own(bin_at(tree, node, each), drafts.fit)
            expected[node] = expected[parent] + (joint[node] if each > num_ahead else 0.0)
    return tree.take(tree.path(max(expected, key=expected.__getitem__)))


def beyond_a_step(speculation: Speculation) -> Speculation:
    """With caps for drafts of which a running step may commit a part: all that it verifies, and its own token."""
    caps = speculation.max_draft_tokens, speculation.max_own_draft_tokens
    deep = [2 * cap + 1 if cap else 0 for cap in caps]
    return replace(speculation, max_draft_tokens=deep[0], max_own_draft_tokens=deep[1])


class DraftBook:
    """The drafts of all open requests of one engine, and what their rows cost."""

    def __init__(self, price_of: Callable[[StepCost], float] = lambda cost: cost.price) -> None:
        self.cost = StepCost()
        self.calibration = Calibration()
        self.price_of = price_of
        """The least chance at which a drafted token is verified, as a function of measured step costs. An operator may
        set one."""
        self._open: dict[str, SequenceDrafts] = {}
        self.forgotten: list[str] = []
        """Requests of which faults ended the drafting, until somebody takes them."""
        self.num_faults = 0
        self._quiet_until_s = 0.0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def row_price(self) -> float:
        """Price of one more row in a step, as a chance."""
        return self.price_of(self.cost)

    @property
    def drafted(self) -> dict[str, SequenceDrafts]:
        """The requests for which something is buffered: others cost a step nothing."""
        return {name: found for name, found in self._open.items() if found.buffer}

    def find(self, request_id: str) -> SequenceDrafts | None:
        return self._open.get(request_id)

    def open(self, request_id: str, drafts: SequenceDrafts) -> None:
        self._open[request_id] = drafts

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """After a fault in what is kept of one request, while it is handled: it is decoded plainly to its end."""
        self.close(request_id)
        self.forgotten.append(request_id)
        self._fault("drafting ends for request %s", request_id)

    def forget_all(self) -> None:
        """After any other fault: all open requests are decoded plainly to their ends."""
        self._fault("drafting ends for %d open requests", len(self._open))
        self.forgotten += self._open
        self._open.clear()

    def _fault(self, message: str, *args: object) -> None:
        self.num_faults += 1
        if (now_s := time.monotonic()) >= self._quiet_until_s:
            self._quiet_until_s = now_s + _QUIET_S
            log.exception(message + "; faults so far: %d", *args, self.num_faults)

    def own_values(self, request_id: str, source: str, most: int) -> list[float]:
        """What each token is worth that the engine drafts for a request itself, of those that it may have and that are
        worth their rows."""
        found, values = self._open.get(request_id), list[float]()
        if found is None:
            return values
        chance, value = self.calibration.own(Bin(source), found.fit), found.speculation.weight
        price = self.row_price
        for _ in range(min(most, found.speculation.max_own_draft_tokens)):
            value *= chance
            # Written so that NaN is worth nothing.
            if not value >= price:
                break
            values.append(value)
        return values

    def own_chain(
        self, request_id: str, source: str, drafted: Sequence[int], token_ids: Sequence[int], num_accepted: int
    ) -> ChainRow | None:
        """What a step has verified that the engine had drafted itself. With asynchronous scheduling only the tokens are
        known that were accepted; the others are -1."""
        if (found := self._open.get(request_id)) is None:
            return None
        accepted = token_ids[:num_accepted]
        known = *accepted, *drafted[len(accepted) :]
        tree = DraftTree(len(found.tokens) - len(token_ids), known, source=source)
        return ChainRow(request_id, tree.base_len, tree=tree, count=len(known))

    def choose(
        self, decoding: Iterable[ChainRow], room: StepRoom, own_sums: Mapping[str, float] = MappingProxyType({})
    ) -> list[ChainRow]:
        """The rows of which the next step verifies drafts. `own_sums`: what the drafts of the engine's own are worth,
        in whose place they would be."""
        price, owns = self.row_price, self.calibration.owns
        chosen, values_left = list[ChainRow](), list[list[float]]()
        for row in decoding:
            if (found := self._open.get(row.request_id)) is None:
                continue
            try:
                depth = row.num_ahead + min(row.room, found.cap)
                tree = found.buffer.chain or best_path(found, self.calibration, depth, row.num_ahead)
                if tree is None:
                    continue
                first = row.base_len - tree.base_len
                chances = owns(tree, found.fit, first, first + depth)
                values = [*accumulate(chances, mul, initial=found.speculation.weight)]
            except Exception:
                self.forget(row.request_id)
                continue
            # They never rise. Written so that NaN is worth nothing.
            if not values[-1] >= price:
                values = [value for value in values if value >= price]
            row.tree, row.count = tree, len(values) - 1 - row.num_ahead
            if row.count > 0:
                if own_sums and sum(values[1 + row.num_ahead :]) <= own_sums.get(row.request_id, 0.0):
                    continue
                chosen.append(row)
                values_left.append(values[1 + row.num_ahead :])
        if not room.holds([row.count for row in chosen]):
            # Of all rows' tokens those are left that are worth most.
            taken = take_drafts([row.left for row in chosen], values_left, room, Pricing())
            for row, draft in zip(chosen, taken, strict=True):
                row.count = len(draft.token_ids)
            chosen = [row for row in chosen if row.count]
        return chosen

    def committed(
        self, request_id: str, token_ids: Sequence[int], row: ChainRow | None, num_drafted: int, *, finished: bool
    ) -> ChainRow:
        """Follows a commit, in a step that verified so many tokens of this row's chain."""
        found = self._open.get(request_id)
        if found is None:
            return NOTHING
        row = row or ChainRow()
        try:
            if row.tree is not None:
                self._verdict(found, row, tuple(token_ids), num_drafted, finished)
            found.advance(token_ids, row.num_drafted)
            row.num_dropped = found.buffer.take_num_dropped()
            return row
        except Exception:
            self.forget(request_id)
            return NOTHING

    def _verdict(
        self, found: SequenceDrafts, row: ChainRow, fresh: tuple[int, ...], num_drafted: int, finished: bool
    ) -> None:
        """Fills in what came of the chain."""
        tree = row.tree
        assert tree is not None
        ids, before = tree.token_ids, len(found.tokens) - len(fresh)
        planned, done = row.base_len - tree.base_len, before - tree.base_len
        if done < planned or ids[planned:done] != tuple(found.tokens[row.base_len : before]):
            # The rows were of no use: the step before has committed something else.
            return
        row.first, row.num_drafted = done, min(num_drafted, len(ids) - done)
        row.num_accepted = accepted = common_len(fresh, ids[done : done + row.num_drafted])
        row.num_verified = accepted + (accepted < row.num_drafted and not (finished and accepted == len(fresh)))
        if row.num_verified:
            self.calibration.verified(bins_of(tree)[done : done + row.num_verified], accepted, found.fit)

    def stepped(self, *, rows: int, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """One step of the engine: its rows that decode or verify, its prompt tokens, the tokens that it committed."""
        self.calibration.stepped()
        self.cost.took(rows=rows, seconds=seconds, tokens=tokens, prompt_tokens=prompt_tokens)
