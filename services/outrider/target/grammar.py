"""Structured output: which tokens a grammar allows next. llguidance reads the grammar and makes the masks.

llguidance is in the extra `structured`. Without it, requests for structured output are refused with that name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.errors import InvalidRequest, NotSupported
from outrider.rpc.v1 import tokenizer_pb2
from outrider.speculation import Grammar
from outrider.target.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)
_FIELD = "logits.grammar"
MAX_COMPILE_S = 10.0
"""The largest grammar that fits a message takes about a second to compile on a slow core."""
_MAX_CACHED = 64
STEP_FUEL = 50_000
"""What the lexer may spend on one mask: some 4 ms. Masks are made on the step thread, so every sequence waits for
them."""
# States of 1 to 2 kB each.
_MAX_LEXER_STATES = 50_000
_THREADS = 2


class GrammarMatcher(Grammar):
    """One sequence's state in its grammar. A token that ends the text also ends the grammar: what follows is not
    checked."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest where they break the grammar."""
        if not self._matcher.consume_tokens(self._before_end(token_ids)):
            raise InvalidRequest(_FIELD, "the committed tokens break it")

    def allowed(self, prefix: Sequence[int]) -> Tensor | None:
        ids, matcher = self._before_end(prefix), self._matcher
        if len(ids) < len(prefix) or matcher.validate_tokens(ids) < len(ids):
            return None
        if ids:
            # On a copy: after the library's rollback, masks were those of another state of the grammar (1.9.1).
            matcher = matcher.deep_copy()
            matcher.consume_tokens(ids)
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise InvalidRequest(_FIELD, "is too complex: a limit of the library was reached")
        mask = np.zeros(self._vocab_size, dtype=bool)
        found = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        mask[: len(found)] = found
        return torch.from_numpy(mask)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        ids = self._before_end(token_ids)
        count = int(self._matcher.validate_tokens(ids))
        return count if count < len(ids) else len(token_ids)

    def _before_end(self, token_ids: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token_id: token_id not in self._eos_token_ids, token_ids))


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
    ) -> None:
        self._max_s = max_s
        self._step_fuel = step_fuel
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="compile grammar")
        self._cached: OrderedDict[bytes, LLMatcher] = OrderedDict()
        """Matchers at the start of each grammar, by its hash; the last used is last."""
        self._checkpoint = checkpoint
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        threading.Thread(target=self._warm, name="read vocabulary", daemon=True).start()

    async def compile_aside(self, grammar: str, committed: Sequence[int]) -> Grammar:
        """As `compile`, on a thread: the library releases the GIL. Also raises InvalidRequest when it takes too long;
        the compilation then ends by itself."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, self.compile, grammar, committed)
        try:
            async with asyncio.timeout(self._max_s):
                return await work
        except TimeoutError:
            raise InvalidRequest(_FIELD, f"could not be compiled within {self._max_s:g} s") from None

    def compile(self, grammar: str, committed: Sequence[int]) -> Grammar:
        """The grammar's state after `committed`, with its first mask computed. Raises InvalidRequest or
        NotSupported."""
        # A copy: a sequence's commits must not change the cached one.
        found = GrammarMatcher(self._begin(grammar).deep_copy(), self._vocab_size, self._eos_token_ids)
        found.advance(committed)
        # The first mask costs most, and copies share its work. Computed here, it delays no step.
        found.allowed(())
        return found

    def _begin(self, grammar: str) -> LLMatcher:
        """Two threads may compile the same: the second result is then kept."""
        with self._lock:
            tokenizer = self._tokenizer
        if tokenizer is None:
            raise NotSupported(_FIELD, "needs the extra `structured` and tokenizer.json at the target")
        digest = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if matcher := self._cached.get(digest):
                self._cached.move_to_end(digest)
                return matcher
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            step_lexer_fuel=self._step_fuel, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
        )
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            # The rest of the library's message is its internal state.
            raise InvalidRequest(_FIELD, matcher.get_error().partition("\n")[0])
        with self._lock:
            self._cached[digest] = matcher
            while len(self._cached) > _MAX_CACHED:
                self._cached.popitem(last=False)
        return matcher

    def _warm(self) -> None:
        with self._lock:
            _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer | None:
        try:
            from llguidance import LLTokenizer

            # Read for gateways already, and cached.
            vocabulary = tokenizer_pb2.Tokenizer.FromString(read_tokenizer(self._checkpoint)).json
            return LLTokenizer(vocabulary.decode(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None)
        except Exception as error:  # a target serves without one; requests that need it are refused
            log.info("no structured output: %s: %s", type(error).__name__, error)
            return None
