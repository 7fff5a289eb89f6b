"""Several answers to one client request: to several prompts, and several to each prompt (`n`, `best_of`).

The other answers to a prompt start after the first token of the first one. They then find the prompt in the target's
prefix cache, so that it is prefilled once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from outrider.gateway.generation.generation import Answer, Chunk
from outrider.gateway.tenants.admission import Kept


@dataclass(frozen=True, slots=True)
class Choices:
    """Running answers, in the order of the prompts, then of the answers to each."""

    answers: list[Answer]
    num_prompts: int
    kept: Kept
    """To be told of what is kept of them until they are whole."""

    @property
    def id(self) -> str:
        return self.answers[0].id

    @property
    def model(self) -> str:
        return self.answers[0].model

    @property
    def per_prompt(self) -> int:
        return len(self.answers) // self.num_prompts

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """(number of the answer, chunk), as they arrive. Raises the first error of any answer and ends the others."""
        if len(self.answers) == 1:
            async for chunk in self.answers[0].chunks:
                yield 0, chunk
            return
        async with aclosing(self._merged()) as merged:
            async for numbered in merged:
                yield numbered

    async def _merged(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        # What is not taken stays with the answers.
        came: asyncio.Queue[tuple[int, Chunk] | Exception] = asyncio.Queue(len(self.answers))
        begun = [asyncio.Event() for _ in range(self.num_prompts)]
        tasks = [
            asyncio.create_task(self._feed(number, came, begun[number // self.per_prompt]))
            for number in range(len(self.answers))
        ]
        try:
            running = len(tasks)
            while running:
                numbered = await came.get()
                if isinstance(numbered, Exception):
                    raise numbered
                yield numbered
                running -= numbered[1].finish is not None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self, number: int, came: asyncio.Queue[tuple[int, Chunk] | Exception], begun: asyncio.Event
    ) -> None:
        if number % self.per_prompt:
            await begun.wait()
        try:
            async for chunk in self.answers[number].chunks:
                await came.put((number, chunk))
                begun.set()
        except Exception as error:
            await came.put(error)
