"""Structured output: compiles grammars for one model's vocabulary, within bounds of time and memory.

Each is tried in a process of its own first (`trial`). What that accepts costs this process as much again, no more.

llguidance is in the extra `structured`. Without it, requests for structured output are refused with that name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import InvalidRequest, NotSupported
from outrider.rpc.v1 import tokenizer_pb2
from outrider.runtime.bounded import BoundedProcess, OutOfBounds
from outrider.runtime.turns import TenantTurns
from outrider.speculation import Grammar
from outrider.target.config import GRAMMAR_BYTES
from outrider.target.grammars import trial
from outrider.target.grammars.matcher import FIELD, GrammarMatcher, Refusal, ThreadedMatcher, WaitAllowance
from outrider.target.grammars.memory import TENANT_SHARE, GrammarMemory, footprint
from outrider.target.grammars.tokenizer import read_tokenizer
from outrider.target.grammars.trial import TrialResult, TrialSetting, process_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)
MAX_COMPILE_S = 2.0
"""Processor time. The largest grammar that fits a message takes about a second to compile on a slow core."""
_MAX_CACHED, _MAX_TRIED = 64, 1024
STEP_FUEL = 50_000
"""What the lexer may spend on one mask in a trial: some 4 ms."""
_LEEWAY = 4
"""What a mask of an answer may spend, in that of a trial. A trial does not see all places of a grammar."""
_MAX_LEXER_STATES = 50_000
_MAX_ITEMS, _MAX_ROW_ITEMS = 50_000, 2_000
"""Of the parser at one mask, and at one place."""
_MAX_SYMBOLS = 500_000
_COMPILE_THREADS = 2
_MAX_MASK_THREADS = 4
_NICE = 10
_TOO_LARGE = Refusal("is too complex: it needs more memory than a tenant's grammars may have")
_NO_ROOM = Refusal("running requests use all memory for grammars", busy=True)


_Key = tuple[str, bytes]
"""A tenant, and the hash of a grammar. What one tenant's texts make of a lexer is of no effect on another's."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Compiled:
    """A grammar at its start. Copies of the matcher share its lexer."""

    matcher: LLMatcher
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: set[object] = field(default_factory=set)
    """One for each sequence that runs."""


def host_bytes(checkpoint: Path, most_bytes: int) -> int:
    """What structured output takes of the machine's memory at most: the grammars, and the processes that try some.
    `most_bytes`: of the grammars."""
    each = process_bytes(len(_vocabulary_of(checkpoint)), int(TENANT_SHARE * most_bytes))
    return most_bytes + _COMPILE_THREADS * each


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Reading the vocabulary takes about a second; a thread begins it at
    start.

    Caches the grammars used last: an application sends the same few again and again.
    """

    def __init__(
        self,
        checkpoint: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_s: float = MAX_COMPILE_S,
        step_fuel: int = STEP_FUEL,
        most_bytes: int = GRAMMAR_BYTES,
        masks_on_threads: bool = True,
        compile_cores: Collection[int] = (),
    ) -> None:
        """`most_bytes`: of cached and running grammars together. `masks_on_threads`: for callers that can do
        without a mask for a while. `compile_cores`: where grammars are tried and compiled;
        none means where the steps run."""
        self.memory = GrammarMemory(most_bytes)
        self._max_s = max_s
        self._trial_limits = {
            "step_lexer_fuel": step_fuel,
            "max_lexer_states": _MAX_LEXER_STATES,
            "step_max_items": _MAX_ITEMS,
            "max_items_in_row": _MAX_ROW_ITEMS,
            "max_grammar_size": _MAX_SYMBOLS,
        }
        self._limits = self._trial_limits | {"step_lexer_fuel": _LEEWAY * step_fuel}
        self._masks_on_threads = masks_on_threads
        self._cached: OrderedDict[_Key, _Compiled] = OrderedDict()
        """The last used is last."""
        self._tried: OrderedDict[_Key, TrialResult] = OrderedDict()
        """What depends on the grammar alone is under no tenant; that it took too long is not sure to happen again."""
        self._trials = threading.local()
        self._compile_cores = compile_cores
        self._checkpoint = checkpoint
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._allowance = WaitAllowance()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        threading.Thread(target=self._warm, name="read vocabulary", daemon=True).start()

    async def compile_on_thread(
        self,
        grammar: str,
        committed: Sequence[int],
        tenant: str = "",
        worked: Callable[[float], None] = lambda seconds: None,
    ) -> Grammar:
        """As `compile`, on a thread: the library releases the GIL. The masks are then made on threads too. `worked` is
        called on them with the seconds of each piece of work."""
        charged = (tenant,) if tenant else ()

        def work() -> GrammarMatcher:
            with _timed(worked):
                return self.compile(grammar, committed, *charged)

        compiling = self._compile_turns.submit(tenant, work)
        try:
            found = await asyncio.wrap_future(compiling)
        finally:
            compiling.cancel()
            # An error that it has refers to this frame.
            del compiling
        if not self._masks_on_threads:
            return found
        submit = partial(self._mask_turns.submit, tenant)
        return ThreadedMatcher(found, submit, self._allowance, worked)

    def compile(self, grammar: str, committed: Sequence[int], tenant: str = "") -> GrammarMatcher:
        """The grammar's state after `committed`, with its first mask computed. Raises InvalidRequest, NotSupported, or
        Overloaded when the grammars of others leave no memory."""
        found = self._matcher(grammar, self._begin(grammar, tenant), tenant)
        found.advance(committed)
        # The first mask costs most, and copies share its work. Computed here, it delays no step.
        found.allowed(())
        return found

    @cached_property
    def _compile_turns(self) -> TenantTurns:
        return TenantTurns(
            _COMPILE_THREADS,
            "compile grammar",
            most_per_tenant=_COMPILE_THREADS - 1,
            nice=_NICE,
            cores=self._compile_cores,
        )

    @cached_property
    def _mask_turns(self) -> TenantTurns:
        # One tenant's masks leave a thread to the others.
        num_threads = max(2, min(_MAX_MASK_THREADS, len(os.sched_getaffinity(0)) // 2))
        return TenantTurns(num_threads, "grammar masks", most_per_tenant=num_threads - 1, nice=_NICE)

    def _begin(self, grammar: str, tenant: str) -> _Compiled:
        """Two threads may compile the same: the second result is then kept."""
        digest = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if compiled := self._cached.get((tenant, digest)):
                self._cached.move_to_end((tenant, digest))
                return compiled
        trial = self._trial(digest, grammar, tenant)
        if trial.fault:
            raise InvalidRequest(FIELD, trial.fault)
        compiled = self._compiled(grammar, tenant, trial.peak_bytes)
        with self._lock:
            self._cached[tenant, digest] = compiled
            while len(self._cached) > _MAX_CACHED:
                self._cached.popitem(last=False)
        return compiled

    def _compiled(self, grammar: str, tenant: str, peak_bytes: int) -> _Compiled:
        """`peak_bytes`: what it may take meanwhile."""
        with self._held_meanwhile(tenant, peak_bytes):
            compiled = _Compiled(self._built(grammar))
            weakref.finalize(compiled, self.memory.release, id(compiled))
        held = footprint(compiled.matcher, len(grammar), self._vocab_size).shared
        if held > TENANT_SHARE * self.memory.most_bytes:
            raise InvalidRequest(FIELD, _TOO_LARGE.message)
        if not self._hold(id(compiled), tenant, held):
            raise _NO_ROOM.error
        return compiled

    @contextmanager
    def _held_meanwhile(self, tenant: str, num_bytes: int) -> Iterator[None]:
        part = object()
        if not self._hold(part, tenant, num_bytes):
            raise _NO_ROOM.error
        try:
            yield
        finally:
            self.memory.release(part)

    def _read_vocabulary(self) -> tuple[LLTokenizer, TrialSetting]:
        with self._reading:
            vocabulary = self._vocabulary
        if vocabulary is None:
            raise NotSupported(FIELD, "needs the extra `structured` and tokenizer.json at the target")
        return vocabulary

    def _built(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        # Errors with the counts that `footprint` reads.
        limits = LLParserLimits(**self._limits, verbose_errors=True)
        return LLMatcher(self._read_vocabulary()[0], grammar, log_level=0, limits=limits)

    def _trial(self, digest: bytes, grammar: str, tenant: str) -> TrialResult:
        """What another process finds, in bounds that the kernel keeps."""
        with self._lock:
            for key in (("", digest), (tenant, digest)):
                if (known := self._tried.get(key)) is not None:
                    self._tried.move_to_end(key)
                    return known
        # One for each thread, because it ends with the thread that starts it.
        process: BoundedProcess | None = getattr(self._trials, "process", None)
        if process is None:
            setting = self._read_vocabulary()[1]
            # A grammar that needs more memory is refused anyway.
            most_bytes = int(TENANT_SHARE * self.memory.most_bytes)
            process = BoundedProcess(
                trial.__name__,
                setting.to_bytes(),
                cpu_s=self._max_s,
                extra_bytes=most_bytes,
                yields=True,
            )
            self._trials.process = process
        key = "", digest
        try:
            found = TrialResult.from_bytes(process.ask(grammar.encode()))
        except OutOfBounds as error:
            log.info("a grammar was refused: %s", error)
            key, found = (tenant, digest), TrialResult("is too complex: it takes too much time or memory to compile")
        with self._lock:
            self._tried[key] = found
            while len(self._tried) > _MAX_TRIED:
                self._tried.popitem(last=False)
        return found

    def _matcher(self, grammar: str, compiled: _Compiled, tenant: str) -> GrammarMatcher:
        """A new user of the grammar, until nobody refers to it."""
        lexing = _Lexing(self, grammar, compiled, tenant)
        # A copy: a sequence's commits must not change the cached one.
        found = GrammarMatcher(compiled.matcher.deep_copy(), self._eos_token_ids, lexing)
        # Neither takes this object's lock: they may run in any thread, also in one that holds it.
        weakref.finalize(found, compiled.users.discard, lexing.owner)
        weakref.finalize(found, self.memory.release, lexing.owner)
        return found

    def forget(self, tenant: str) -> None:
        """Grammars of a tenant, and what trials found: a fault may quote one."""
        with self._lock:
            forgotten = [self._cached.pop(key) for key in list(self._cached) if key[0] == tenant]
            self._tried.clear()
        # The last reference to some, perhaps, which ends without the lock.
        del forgotten

    def _forget(self, spent: _Compiled) -> None:
        """New sequences do not get its lexer."""
        with self._lock:
            for key in [key for key, each in self._cached.items() if each is spent]:
                del self._cached[key]

    def _hold(self, part: object, tenant: str, num_bytes: int) -> bool:
        """Forgets unused grammars where there is too little memory. False where that is not enough."""
        while not self.memory.hold(part, tenant, num_bytes):
            if not self._forget_one():
                return False
        return True

    def _forget_one(self) -> bool:
        """Forgets the unused grammar that was used longest ago. False where there is none."""
        with self._lock:
            unused = next((key for key, each in self._cached.items() if not each.users), None)
            if unused is None:
                return False
            # Its memory is released as the last reference ends: here, if no thread is about to use it.
            forgotten = self._cached.pop(unused)
        del forgotten
        return True

    def _warm(self) -> None:
        with self._reading:
            _ = self._vocabulary

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, TrialSetting] | None:
        try:
            from llguidance import LLTokenizer

            text = _vocabulary_of(self._checkpoint)
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None)
            return tokenizer, TrialSetting(text, self._vocab_size, self._eos_token_ids, self._trial_limits)
        except Exception as error:  # a target serves without one; requests that need it are refused
            log.info("no structured output: %s: %s", type(error).__name__, error)
            return None


class _Lexing:
    """Of one sequence."""

    def __init__(self, compiler: GrammarCompiler, grammar: str, compiled: _Compiled, tenant: str) -> None:
        self.owner = object()
        """Of what is this sequence's own."""
        self._compiler = compiler
        self._grammar = grammar
        self._compiled = compiled
        self._tenant = tenant
        compiled.users.add(self.owner)

    @property
    def lock(self) -> threading.Lock:
        return self._compiled.lock

    def renewed(self) -> LLMatcher:
        compiler, spent = self._compiler, self._compiled
        compiler._forget(spent)
        self._compiled = _Compiled(compiler._built(self._grammar))
        weakref.finalize(self._compiled, compiler.memory.release, id(self._compiled))
        spent.users.discard(self.owner)
        return self._compiled.matcher

    def measured(self, matcher: LLMatcher, mask_bytes: int) -> Refusal | None:
        compiler, tenant = self._compiler, self._tenant
        held = footprint(matcher, len(self._grammar), compiler._vocab_size)
        own = held.own + mask_bytes
        if compiler._hold(id(self._compiled), tenant, held.shared) and compiler._hold(self.owner, tenant, own):
            return None
        return _TOO_LARGE if held.shared + own > TENANT_SHARE * compiler.memory.most_bytes else _NO_ROOM


def _vocabulary_of(checkpoint: Path) -> str:
    # Read for gateways already, and cached.
    return tokenizer_pb2.Tokenizer.FromString(read_tokenizer(checkpoint)).json.decode()


@contextmanager
def _timed(worked: Callable[[float], None]) -> Iterator[None]:
    started_s = time.perf_counter()
    try:
        yield
    finally:
        worked(time.perf_counter() - started_s)
