"""A sequence's state in its grammar: which tokens may come next. llguidance makes the masks.

`GrammarMatcher` does the work where it is called. `ThreadedMatcher` does it on threads, so that a step waits little for
one sequence's masks, and in all no longer than its allowance.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from outrider.errors import InvalidRequest
from outrider.speculation import Grammar, MaskLate
from outrider.target.grammars.trial import TOO_COMPLEX

if TYPE_CHECKING:
    from llguidance import LLMatcher

FIELD = "logits.grammar"
_MEASURE_AFTER_S = 0.002
_MEASURE_AFTER = 32
Bits = bytes | None
"""A mask, as Grammar.allowed; None after a prefix that is not allowed itself."""


class GrammarMatcher(Grammar):
    """A token that ends the text also ends the grammar: what follows is not checked.

    The library's copies share one lexer. Its budget of work is renewed by each mask, and once it is spent, all copies
    have failed. So a token is consumed only after the mask that allows it, whether it was drafted or committed; and
    where a limit is reached, the text is followed again with a lexer of its own: only what fails there ends an answer.
    That depends on grammar and text alone, neither on drafts nor on other sequences, nor on time.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: Collection[int],
        measured: Callable[[LLMatcher, bool], None] = lambda matcher, alone: None,
        renewed: Callable[[], LLMatcher] | None = None,
    ) -> None:
        """`measured`: called as the matcher's memory grows, with whether its lexer is its own. Raises InvalidRequest
        where there is no more memory. `renewed`: makes a matcher at the grammar's start, with a new lexer."""
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._measured = measured
        self._renewed = renewed
        self._alone = False
        self._committed: list[int] = []
        self._masks: dict[tuple[int, ...], bytes | None] = {}
        """After the committed tokens and this prefix; None where a limit is reached."""
        self._ahead: tuple[tuple[int, ...], LLMatcher] = ((), matcher)
        """A copy, after the prefix that was looked at last."""
        self._unmeasured_s, self._num_unmeasured = 0.0, 0
        self._refused: InvalidRequest | None = None
        """There is no more memory."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest where they break the grammar."""
        ids = tuple(self._before_end(token_ids))
        if self.num_allowed(ids) < len(ids):
            if any(mask is None for mask in self._masks.values()):
                raise _too_complex()
            raise InvalidRequest(FIELD, "the committed tokens break it")
        if not self._matcher.consume_tokens(list(ids)):
            self._renew(ids)
            if self._matcher.is_error():
                raise _too_complex()
        self._committed += ids
        self._masks = {each[len(ids) :]: mask for each, mask in self._masks.items() if each[: len(ids)] == ids}
        self._ahead = (), self._matcher

    def allowed(self, prefix: Sequence[int]) -> Bits:
        """Raises InvalidRequest where there is no mask within the limits of work and memory."""
        ids = tuple(self._before_end(prefix))
        if len(ids) < len(prefix) or self.num_allowed(ids) < len(ids):
            return None
        if (found := self._mask(ids)) is None:
            raise _too_complex()
        if self._refused is not None:
            raise self._refused
        return found

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Those up to the place where a limit is reached: `allowed` says so when the text is there."""
        ids = tuple(self._before_end(token_ids))
        for length, token_id in enumerate(ids):
            mask = self._mask(ids[:length])
            if mask is None or not mask[token_id // 8] >> token_id % 8 & 1:
                return length
        return len(token_ids)

    def _mask(self, ids: tuple[int, ...]) -> bytes | None:
        """`ids`: allowed, one after the other. None where a limit is reached."""
        if ids not in self._masks:
            started_s = time.thread_time()
            found = self._computed(ids)
            if found is None and self._renewed is not None:
                self._renew(())
                found = self._computed(ids)
            self._masks[ids] = found
            self._measure(time.thread_time() - started_s)
        return self._masks[ids]

    def _computed(self, ids: tuple[int, ...]) -> bytes | None:
        matcher = self._at(ids)
        found = bytes(matcher.compute_bitmask())
        return None if matcher.is_error() else found

    def _at(self, ids: tuple[int, ...]) -> LLMatcher:
        if not ids:
            return self._matcher
        # Not by the library's rollback: after it, masks were those of another state of the grammar (1.9.1).
        reached, matcher = self._ahead
        if not reached or ids[: len(reached)] != reached:
            reached, matcher = (), self._matcher.deep_copy()
        matcher.consume_tokens(list(ids[len(reached) :]))
        self._ahead = ids, matcher
        return matcher

    def _renew(self, more: tuple[int, ...]) -> None:
        """Begins again with a new lexer, after the committed tokens and `more`, if there may be one."""
        if self._renewed is None:
            return
        self._matcher, self._alone = self._renewed(), True
        self._ahead = (), self._matcher
        for token_id in (*self._committed, *more):
            self._matcher.compute_bitmask()
            self._matcher.consume_token(token_id)

    def _measure(self, seconds: float) -> None:
        """What takes no time adds no states."""
        self._unmeasured_s += seconds
        self._num_unmeasured += 1
        if self._unmeasured_s > _MEASURE_AFTER_S or self._num_unmeasured >= _MEASURE_AFTER:
            self._unmeasured_s, self._num_unmeasured = 0.0, 0
            try:
                self._measured(self._matcher, self._alone)
            except InvalidRequest as error:
                self._refused = error

    def _before_end(self, token_ids: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token_id: token_id not in self._eos_token_ids, token_ids))


class WaitAllowance:
    """How long steps may wait for masks: a share of the time, and little at once. For one thread."""

    def __init__(self, share: float = 0.15, most_s: float = 0.005, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._most_s = most_s
        self._clock = clock
        self._left_s, self._at_s = most_s, clock()

    def wait(self, condition: threading.Condition, done: Callable[[], bool]) -> bool:
        """Whether `done` within what is left. The condition's lock is held."""
        now_s = self._clock()
        self._left_s = min(self._most_s, self._left_s + self._share * (now_s - self._at_s))
        found = done() or condition.wait_for(done, self._left_s)
        self._at_s = self._clock()
        self._left_s = max(0.0, self._left_s - (self._at_s - now_s))
        return found


class ThreadedMatcher(Grammar):
    """The step thread asks; a thread of `submit` works, in the order of the questions."""

    def __init__(
        self,
        inner: GrammarMatcher,
        submit: Callable[[Callable[[], None]], object],
        allowance: WaitAllowance,
        worked: Callable[[float], None],
    ) -> None:
        """`worked`: called on the thread with the seconds of each piece of work."""
        self._inner = inner
        self._submit = submit
        self._allowance = allowance
        self._worked = worked
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._working = False
        self._late = False
        self._generation = 0
        """Counts the advances. What belongs to an earlier one is of another place in the grammar."""
        self._asked: set[tuple[int, ...]] = set()
        self._masks: dict[tuple[int, ...], Bits | InvalidRequest] = {}
        """After the committed tokens and this prefix."""
        self._counts: dict[tuple[int, ...], int] = {}
        self._ask(())

    @property
    def awaited(self) -> bool:
        """A step has waited in vain, and the work is not done yet."""
        self._late = self._late and (self._working or bool(self._jobs))
        return self._late

    def advance(self, token_ids: Sequence[int]) -> None:
        with self._changed:
            self._generation += 1
            self._asked, self._masks, self._counts = {()}, {}, {}
            self._add(partial(self._advance, tuple(token_ids), self._generation))

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """All of them until the answer is known."""
        ids = tuple(token_ids)
        with self._changed:
            self._ask(ids)
            return self._counts.get(ids, len(ids))

    def allowed(self, prefix: Sequence[int]) -> Bits:
        """Raises MaskLate."""
        ids = tuple(prefix)
        with self._changed:
            if ids not in self._masks:
                self._ask(ids)
            if not self._allowance.wait(self._changed, lambda: ids in self._masks):
                self._late = True
                raise MaskLate(FIELD, "its mask takes long")
            found = self._masks[ids]
        if isinstance(found, InvalidRequest):
            raise found
        return found

    def _ask(self, ids: tuple[int, ...]) -> None:
        if ids not in self._asked:
            self._asked.add(ids)
            self._add(partial(self._make, ids, self._generation))

    def _add(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        if not self._working:
            self._working = True
            self._submit(self._work)

    def _work(self) -> None:
        """One job, so that others have their turns."""
        started_s = time.perf_counter()
        with self._changed:
            job = self._jobs.popleft()
        try:
            job()
        finally:
            with self._changed:
                self._working = False
                if self._jobs:
                    self._working = True
                    self._submit(self._work)
            self._worked(time.perf_counter() - started_s)

    def _advance(self, ids: tuple[int, ...], generation: int) -> None:
        try:
            self._inner.advance(ids)
        except InvalidRequest as error:
            self._know((), error, generation)
        else:
            self._make((), generation)

    def _make(self, ids: tuple[int, ...], generation: int) -> None:
        """The masks along `ids`."""
        if generation != self._generation:
            return
        count = self._inner.num_allowed(ids)
        with self._changed:
            if generation == self._generation:
                self._counts[ids] = count
        for length in range(len(ids) + 1):
            # Each is of use as soon as it is made.
            if generation == self._generation and ids[:length] not in self._masks:
                self._know(ids[:length], self._mask(ids[:length]) if length <= count else None, generation)

    def _mask(self, prefix: tuple[int, ...]) -> Bits | InvalidRequest:
        try:
            return self._inner.allowed(prefix)
        except InvalidRequest as error:
            return error

    def _know(self, ids: tuple[int, ...], mask: Bits | InvalidRequest, generation: int) -> None:
        with self._changed:
            if generation == self._generation:
                self._masks[ids] = mask
                self._changed.notify_all()


def _too_complex() -> InvalidRequest:
    return InvalidRequest(FIELD, TOO_COMPLEX)
