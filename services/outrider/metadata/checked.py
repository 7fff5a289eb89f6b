"""At the start of a program: a store that can never be used ends it with one line."""

from __future__ import annotations

import asyncio
import sys

from outrider.metadata.store import MetadataStore


def check_store(program: str, url: str) -> None:
    """Ends the program if the store is in cluster mode, refuses the login, or the like. One that does not answer may
    come later: the processes wait for it. Blocks for a second at most."""
    if url and (problem := asyncio.run(_problem(url))) is not None:
        sys.exit(f"{program}: metadata: {problem}")


async def _problem(url: str) -> str | None:
    async with MetadataStore.connect(url) as store:
        return await store.problem()
