"""A sequence's state in its grammar: which tokens may come next. llguidance makes the masks.

`GrammarMatcher` does the work where it is called. `ThreadedMatcher` does it on threads, so that a step waits little for
one sequence's masks, and in all no longer than its allowance.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from outrider.errors import InternalError, InvalidRequest, OutriderError, Overloaded
from outrider.speculation import Grammar, MaskLate
from outrider.target.grammars.trial import TOO_COMPLEX

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

FIELD = "logits.grammar"
_MEASURE_AFTER_S = 0.002
_MEASURE_AFTER = 32


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no mask. It is kept, and an exception would keep the frames that it came through."""

    message: str
    busy: bool = False
    """Others hold what it needs: it may be had later."""
    fault: bool = False
    """Something went wrong that is not the grammar's."""

    @property
    def error(self) -> OutriderError:
        if self.fault:
            return InternalError(self.message)
        if self.busy:
            return Overloaded(self.message, retry_after_s=1.0)
        return InvalidRequest(FIELD, self.message)


class Lexing(Protocol):
    """The lexer that a matcher works on, and what the two hold of the memory."""

    @property
    def lock(self) -> threading.Lock:
        """One thread at a time works on a lexer: the library waits for another without letting go of the GIL."""
        ...

    def renewed(self) -> LLMatcher | None:
        """At the grammar's start, with a new lexer, from now on of this matcher alone. None if there is no other."""
        ...

    def measured(self, matcher: LLMatcher, mask_bytes: int) -> Refusal | None:
        """Counts what it holds now. Says so where that is too much."""
        ...


class GrammarMatcher(Grammar):
    """A token that ends the text also ends the grammar: what follows is not checked.

    The library's copies share one lexer. Its budget of work is renewed by each mask, and once it is spent, or has too
    many states, all copies have failed. So a token is consumed only after the mask that allows it. Where a limit is
    reached, the committed text is followed again on a lexer of its own: only what fails there ends an answer. Drafted
    tokens end none: where they reach a limit, no more of them are looked at.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: Collection[int], lexing: Lexing) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._lexing = lexing
        self._alone = False
        """Whether its lexer is its own."""
        self._looks_ahead = True
        self._committed: list[int] = []
        self._masks: dict[tuple[int, ...], bytes | None] = {}
        """After the committed tokens and this prefix; None where a limit is reached."""
        self._ahead: tuple[tuple[int, ...], LLMatcher] = ((), matcher)
        """A copy, after the prefix that was looked at last."""
        self._unmeasured_s, self._num_unmeasured = 0.0, 0
        self._refused: Refusal | None = None
        """There is no more memory."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest where they break the grammar, and as `allowed`."""
        for token_id in self._before_end(token_ids):
            if not _allows(self._required(()), token_id):
                raise InvalidRequest(FIELD, "the committed tokens break it")
            self._commit(token_id)

    def allowed(self, prefix: Sequence[int]) -> bytes | None:
        """Raises InvalidRequest where there is no mask within the limits of work and memory, and Overloaded where
        others have the memory."""
        ids = tuple(self._before_end(prefix))
        if len(ids) < len(prefix):
            return None
        for length, token_id in enumerate(ids):
            if not _allows(self._required(ids[:length]), token_id):
                return None
        return self._required(ids)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Those after each of which there is a mask."""
        ids = tuple(self._before_end(token_ids))
        for length in range(len(ids) + 1):
            if (mask := self._mask(ids[:length])) is None:
                return max(0, length - 1)
            if length < len(ids) and not _allows(mask, ids[length]):
                return length
        return len(token_ids)

    def _required(self, ids: tuple[int, ...]) -> bytes:
        found = self._mask(ids)
        if self._refused is not None:
            raise self._refused.error
        if found is None:
            raise InvalidRequest(FIELD, TOO_COMPLEX)
        return found

    def _mask(self, ids: tuple[int, ...]) -> bytes | None:
        """`ids`: allowed, one after the other. None where a limit is reached."""
        if ids not in self._masks:
            started_s = time.thread_time()
            self._masks[ids] = self._made(ids)
            self._measure(time.thread_time() - started_s)
        return self._masks[ids]

    def _made(self, ids: tuple[int, ...]) -> bytes | None:
        if not ids:
            found = self._computed(())
            return self._computed(()) if found is None and self._followed() else found
        found = self._computed(ids) if self._looks_ahead else None
        # Its lexer has failed too.
        self._looks_ahead = found is not None
        return found

    def _computed(self, ids: tuple[int, ...]) -> bytes | None:
        with self._lexing.lock:
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

    def _commit(self, token_id: int) -> None:
        with self._lexing.lock:
            consumed = self._matcher.consume_token(token_id)
        self._committed.append(token_id)
        # What was not found along drafts may be found along a text.
        self._masks = {ids[1:]: mask for ids, mask in self._masks.items() if ids[:1] == (token_id,) and mask}
        self._ahead = (), self._matcher
        if not consumed:
            self._followed()

    def _followed(self) -> bool:
        """Begins again with a new lexer, and works as if there had never been a draft. False where there is none."""
        if (matcher := self._lexing.renewed()) is None:
            return False
        # What fails on a lexer of its own has failed by what was looked at ahead, or fails again.
        self._looks_ahead = self._looks_ahead and not self._alone
        self._matcher, self._alone, self._ahead = matcher, True, ((), matcher)
        for token_id in self._committed:
            matcher.compute_bitmask()
            matcher.consume_token(token_id)
        return True

    def _measure(self, seconds: float) -> None:
        """What takes no time adds no states."""
        self._unmeasured_s += seconds
        self._num_unmeasured += 1
        if self._unmeasured_s > _MEASURE_AFTER_S or self._num_unmeasured >= _MEASURE_AFTER:
            self._unmeasured_s, self._num_unmeasured = 0.0, 0
            self._refused = self._measured()
            if self._refused is not None and (self._looks_ahead or not self._alone) and self._followed():
                # Drafts, or others with the same grammar, may have taken it.
                self._looks_ahead = False
                self._refused = self._measured()

    def _measured(self) -> Refusal | None:
        with self._lexing.lock:
            return self._lexing.measured(self._matcher, sum(map(len, filter(None, self._masks.values()))))

    def _before_end(self, token_ids: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token_id: token_id not in self._eos_token_ids, token_ids))


def _allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


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
        self._masks: dict[tuple[int, ...], bytes | Refusal | None] = {}
        """After the committed tokens and this prefix."""
        self._counts: dict[tuple[int, ...], int] = {}
        self._fault: Refusal | None = None
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

    def allowed(self, prefix: Sequence[int]) -> bytes | None:
        """Raises MaskLate, as GrammarMatcher, and InternalError once anything else was raised on the thread."""
        ids = tuple(prefix)
        with self._changed:
            if ids not in self._masks:
                self._ask(ids)
            if not self._allowance.wait(self._changed, lambda: self._fault is not None or ids in self._masks):
                self._late = True
                raise MaskLate(FIELD, "its mask takes long")
            found = self._fault or self._masks[ids]
        if isinstance(found, Refusal):
            raise found.error
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
        # The library is in Rust, and what panics there is no Exception.
        except BaseException:
            log.exception("the masks of a grammar failed")
            self._fault = Refusal("the masks of its grammar failed", fault=True)
        finally:
            with self._changed:
                self._changed.notify_all()
                self._working = False
                if self._jobs:
                    self._working = True
                    self._submit(self._work)
            self._worked(time.perf_counter() - started_s)

    def _advance(self, ids: tuple[int, ...], generation: int) -> None:
        try:
            self._inner.advance(ids)
        except OutriderError as error:
            self._know((), _refusal(error), generation)
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
                self._know(ids[:length], self._mask(ids[:length]), generation)

    def _mask(self, prefix: tuple[int, ...]) -> bytes | Refusal | None:
        try:
            return self._inner.allowed(prefix)
        except OutriderError as error:
            return _refusal(error)

    def _know(self, ids: tuple[int, ...], mask: bytes | Refusal | None, generation: int) -> None:
        with self._changed:
            if generation == self._generation:
                self._masks[ids] = mask
                self._changed.notify_all()


def _refusal(error: OutriderError) -> Refusal:
    return Refusal(error.message, busy=isinstance(error, Overloaded))
