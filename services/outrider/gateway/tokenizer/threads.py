"""Where prompts are tokenised: threads of their own, so that neither the event loop nor loading a model waits.

Tokenising takes about a second for a megabyte. Long prompts have a thread to themselves and never hold up short ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SHORT_CHARS = 16_384
"""Up to here a prompt counts as short: some 10 ms."""

Result = TypeVar("Result")


class TokenizerThreads:
    """Starts its threads when first used. `close` it."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="tokenize short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize long")

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on a text of so many characters. Cancelled while it waits, it never runs."""
        executor = self._short if num_chars <= SHORT_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    def close(self) -> None:
        """Drops what waits. What runs ends by itself."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
