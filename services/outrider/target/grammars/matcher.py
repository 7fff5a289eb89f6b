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

if TYPE_CHECKING:
    from llguidance import LLMatcher

FIELD = "logits.grammar"
_MEASURE_AFTER_S = 0.002
_MEASURE_AFTER = 32
_MASKS_S, _MASKS_S_PER_TOKEN = 2.0, 0.1
"""Processor time that a sequence's masks may take at once, and for each token that is committed. Usual masks take well
under a millisecond. The library bounds one by the states of its lexer: where expressions intersect, that was a second.
"""
Bits = bytes | None
"""A mask, as Grammar.allowed; None after a prefix that is not allowed itself."""


class GrammarMatcher(Grammar):
    """A token that ends the text also ends the grammar: what follows is not checked."""

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: Collection[int],
        measured: Callable[[LLMatcher], None] = lambda matcher: None,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`measured`: called as the matcher's memory grows. Raises InvalidRequest where there is no more.
        `thread_clock`: processor time of this thread, in seconds."""
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._measured = measured
        self._thread_clock = thread_clock
        self._unmeasured_s, self._num_unmeasured = 0.0, 0
        self._left_s = _MASKS_S

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest where they break the grammar."""
        self._left_s = min(_MASKS_S, self._left_s + _MASKS_S_PER_TOKEN * len(token_ids))
        ids = self._before_end(token_ids)
        if self._num_valid(ids) < len(ids):
            raise InvalidRequest(FIELD, "the committed tokens break it")
        if not self._matcher.consume_tokens(ids):
            raise _too_complex()

    def allowed(self, prefix: Sequence[int]) -> Bits:
        """Raises InvalidRequest where it reaches a limit: no mask can be broken off, but there are no more then."""
        if self._left_s < 0:
            raise InvalidRequest(FIELD, "is too complex: its masks take too long")
        started_s = self._thread_clock()
        ids, matcher = self._before_end(prefix), self._matcher
        if len(ids) < len(prefix) or self._num_valid(ids) < len(ids):
            return None
        if ids:
            # On a copy: after the library's rollback, masks were those of another state of the grammar (1.9.1).
            matcher = matcher.deep_copy()
            matcher.consume_tokens(ids)
        found = bytes(matcher.compute_bitmask())
        if matcher.is_error():
            raise _too_complex()
        took_s = self._thread_clock() - started_s
        self._left_s -= took_s
        self._measure(took_s)
        return found

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        ids = self._before_end(token_ids)
        count = int(self._matcher.validate_tokens(ids))
        return count if count < len(ids) else len(token_ids)

    def _num_valid(self, ids: list[int]) -> int:
        count = int(self._matcher.validate_tokens(ids))
        if self._matcher.is_error():
            raise _too_complex()
        return count

    def _measure(self, seconds: float) -> None:
        """What takes no time adds no states."""
        self._unmeasured_s += seconds
        self._num_unmeasured += 1
        if self._unmeasured_s > _MEASURE_AFTER_S or self._num_unmeasured >= _MEASURE_AFTER:
            self._unmeasured_s, self._num_unmeasured = 0.0, 0
            self._measured(self._matcher)

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
    return InvalidRequest(FIELD, "is too complex: a limit of the library was reached")
