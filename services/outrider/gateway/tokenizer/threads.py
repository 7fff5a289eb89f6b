"""The threads that tokenise prompts and read grammars, so that neither the event loop nor the loading of a model waits.

Tokenising takes about a second per megabyte. Long prompts have a separate thread and never delay short ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from outrider.turns import deep_stacks

SHORT_CHARS = 16_384
"""Longest short prompt: it takes some 10 ms."""

Result = TypeVar("Result")


class TokenizerThreads:
    """Starts its threads when first used. `close` it."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="tokenize short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize long")

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on a text of `num_chars`. If cancelled while it waits, `work` never runs."""
        executor = self._short if num_chars <= SHORT_CHARS else self._long
        with deep_stacks():
            # Starts a thread where none is idle.
            working = asyncio.get_running_loop().run_in_executor(executor, work)
        return await working

    def close(self) -> None:
        """Drops waiting work. Running work ends by itself."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
