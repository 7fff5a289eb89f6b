"""The drafts of the requests that are open in one vLLM engine: what is buffered, what it is worth, what came of it.

Knows neither vLLM nor routers. Used on the thread that schedules. vLLM verifies chains: of all that is proposed for a
request, merged to one tree, the path is taken of which most tokens are expected to be accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from outrider.sequence.key import Finish
from outrider.sequence.speculation import Speculation
from outrider.target.drafts.calibration import Bin, Calibration, bin_at, bins_of
from outrider.target.drafts.choice import DraftChoice, Pricing, StepRoom, take_drafts
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.by_source import tokens_by_source
from outrider.target.requests.row import StepRow
from outrider.tree import ROOT, DraftTree, common_len
from outrider.worker.step_cost import StepCost

log = logging.getLogger(__name__)

_QUIET_S = 60.0
"""Between two lines about faults: what fails in one step fails in the next too."""


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
class VerifiedDraft:
    """What one step did with a request's drafted tokens."""

    draft: DraftTree = field(default_factory=lambda: DraftTree(0))
    """The chain."""
    num_verified: int = 0
    """Positions verified that count: up to the end of the text, or to the first rejection."""
    num_accepted: int = 0
    num_dropped: int = 0
    """Tokens of draft workers that came late or did not fit, since the last commit."""

    def fill(self, row: StepRow[Any], token_ids: Sequence[int], finish: Finish) -> None:
        """What the step commits."""
        row.token_ids, row.finish = token_ids, finish
        row.draft, row.accepted, row.num_verified = self.draft, range(self.num_accepted), self.num_verified
        row.num_dropped = self.num_dropped
        row.sources = tokens_by_source(self.draft, row.accepted, range(self.num_verified))


_NOTHING = VerifiedDraft()


def _verified(chain: DraftTree, tokens: Sequence[int], before: int, count: int) -> DraftTree:
    """What a step has verified of the chain: its tokens after the `before` ones that the steps before it committed.
    Empty if these are not in it: the rows were of no use."""
    done = before - chain.base_len
    if done < 0 or tuple(tokens[chain.base_len : before]) != chain.token_ids[:done]:
        return _NOTHING.draft
    return chain.part(done, done + count)


def best_path(drafts: SequenceDrafts, calibration: Calibration, room: int, num_ahead: int) -> DraftTree | None:
    """Of all that is buffered the chain of which most tokens are expected to be accepted, as far as a step verifies it.
    The first `num_ahead` tokens count for nothing: a running step should commit them."""
    tree, limit = drafts.buffer.merged(), num_ahead + min(room, drafts.cap)
    if tree is None or not tree.parents:
        return tree and tree.upto(limit)
    joint, expected = {ROOT: 1.0}, {ROOT: 0.0}
    for node, depth in enumerate(tree.depths()):
        if depth <= limit:
            parent = tree.parent(node)
            joint[node] = joint[parent] * calibration.own(bin_at(tree, node, depth), drafts.fit)
            expected[node] = expected[parent] + (joint[node] if depth > num_ahead else 0.0)
    return tree.take(tree.path(max(expected, key=expected.__getitem__)))


def beyond_a_step(speculation: Speculation) -> Speculation:
    """With caps for drafts of which a running step may commit a part: all that it verifies, and its own token."""
    caps = speculation.max_draft_tokens, speculation.max_own_draft_tokens
    deep = [2 * cap + 1 if cap else 0 for cap in caps]
    return replace(speculation, max_draft_tokens=deep[0], max_own_draft_tokens=deep[1])


class DraftBook:
    """The drafts of all open requests of one engine, and what their rows cost."""

    def __init__(self, row_price: Callable[[StepCost], float] = lambda cost: cost.price) -> None:
        """`row_price`: the least chance at which a drafted token is verified, as a function of measured step costs."""
        self.cost = StepCost()
        self.calibration = Calibration()
        self._row_price = row_price
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
        return self._row_price(self.cost)

    def holds(self, request_id: str) -> bool:
        """Whether something is buffered: others cost a step nothing."""
        found = self._open.get(request_id)
        return found is not None and bool(found.buffer.trees)

    @property
    def drafted(self) -> list[str]:
        """Those for which something is buffered that could be worth its row: in a large batch nothing is."""
        price = self.row_price
        return [name for name, each in self._open.items() if each.buffer.trees and each.speculation.weight >= price]

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
    ) -> DraftTree | None:
        """What a step has verified that the engine had drafted itself. With asynchronous scheduling only the tokens are
        known that were accepted; the others are -1."""
        if (found := self._open.get(request_id)) is None:
            return None
        accepted = token_ids[:num_accepted]
        known = *accepted, *drafted[len(accepted) :]
        return DraftTree(len(found.tokens) - len(token_ids), known, source=source)

    def choose(
        self, decoding: Iterable[Decoding], room: StepRoom, own_sums: Mapping[str, float] = MappingProxyType({})
    ) -> list[tuple[Decoding, DraftTree, int]]:
        """The chains of which the next step verifies so many tokens, after those that a running one commits.
        `own_sums`: what the drafts of the engine's own are worth, in whose place they would be."""
        price, choices = self.row_price, list[tuple[Decoding, DraftChoice]]()
        for one in decoding:
            if (found := self._open.get(one.request_id)) is None:
                continue
            try:
                choice = self._choice(found, one)
            except Exception:
                self.forget(one.request_id)
                continue
            if choice is not None and choice.paying_sum(price) > own_sums.get(one.request_id, 0.0):
                choices.append((one, choice))
        take_drafts([choice for _, choice in choices], room, Pricing(price, self.calibration))
        counted = [(one, choice.tree, len(choice.nodes) - one.num_ahead) for one, choice in choices]
        return [(one, chain, count) for one, chain, count in counted if count]

    def _choice(self, found: SequenceDrafts, one: Decoding) -> DraftChoice | None:
        path = best_path(found, self.calibration, one.room, one.num_ahead)
        if path is None or len(path) <= one.num_ahead:
            return None
        return DraftChoice(path, found, self.calibration, one.num_ahead)

    def committed(
        self, request_id: str, token_ids: Sequence[int], chain: DraftTree | None, num_drafted: int, *, finished: bool
    ) -> VerifiedDraft:
        """Follows a commit, in a step that verified so many tokens of this chain."""
        found = self._open.get(request_id)
        if found is None:
            return _NOTHING
        try:
            return self._follow(request_id, found, token_ids, chain, num_drafted, finished=finished)
        except Exception:
            self.forget(request_id)
            return _NOTHING

    def _follow(
        self,
        request_id: str,
        found: SequenceDrafts,
        token_ids: Sequence[int],
        chain: DraftTree | None,
        num_drafted: int,
        *,
        finished: bool,
    ) -> VerifiedDraft:
        before = len(found.tokens) - len(token_ids)
        draft = _NOTHING.draft if chain is None else _verified(chain, found.tokens, before, num_drafted)
        num_accepted = common_len(token_ids, draft.token_ids)
        ended = finished and num_accepted == len(token_ids)
        num_verified = num_accepted + (num_accepted < len(draft) and not ended)
        if num_verified:
            bins = bins_of(draft.upto(num_verified))
            self.calibration.observe([(each, node < num_accepted) for node, each in enumerate(bins)], found.fit)
        if found.buffer.trees:
            found.advance(token_ids, len(draft))
        return VerifiedDraft(draft, num_verified, num_accepted, found.buffer.take_num_dropped())

    def stepped(self, *, rows: int, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """One step of the engine: its rows that decode or verify, its prompt tokens, the tokens that it committed."""
        self.calibration.stepped()
        self.cost.took(rows=rows, seconds=seconds, tokens=tokens, prompt_tokens=prompt_tokens)
