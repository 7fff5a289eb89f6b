"""The threads that tokenise prompts and read grammars, so that neither the event loop nor the loading of a model waits.

Tokenising takes about a second per megabyte. Long prompts have a separate thread and never delay short ones. Tenants
take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from outrider.gateway.tools.grammars import GrammarMaker
from outrider.runtime.turns import TenantTurns

SHORT_CHARS = 16_384
"""Longest short prompt: it takes some 10 ms."""

Result = TypeVar("Result")
P = ParamSpec("P")


class TokenizerThreads:
    """`close` it."""

    def __init__(self) -> None:
        self._short = TenantTurns(2, "tokenize short")
        self._long = TenantTurns(1, "tokenize long")
        self._grammars = GrammarMaker()

    def of(self, tenant: str) -> TenantThreads:
        return TenantThreads(self._short, self._long, self._grammars, tenant)

    def close(self) -> None:
        """Drops waiting work. Running work ends by itself."""
        self._short.close()
        self._long.close()
        self._grammars.close()


@dataclass(frozen=True, slots=True)
class TenantThreads:
    """The threads for one tenant's work."""

    short: TenantTurns
    long: TenantTurns
    grammars: GrammarMaker
    tenant: str

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """The result of `work` on a text of `num_chars`. If cancelled while it waits, `work` never runs."""
        turns = self.short if num_chars <= SHORT_CHARS else self.long
        return await asyncio.wrap_future(turns.submit(self.tenant, work))

    async def rendered(
        self, rendering: Callable[Concatenate[str, P], Future[str]], *what: P.args, **how: P.kwargs
    ) -> str:
        """What a model's `rendering` gives, in the tenant's turn at its template."""
        return await asyncio.wrap_future(rendering(self.tenant, *what, **how))
