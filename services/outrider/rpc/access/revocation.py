"""Ends a running call when its caller may no longer make it: the key was revoked or has expired, or lost its scope."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.errors import PermissionDenied, Unauthenticated, Unavailable
from outrider.rpc.access.roles import Caller
from outrider.supervision import beside

RECHECK_S = 20.0


@asynccontextmanager
async def while_admitted(caller: Caller) -> AsyncIterator[None]:
    """Cancels the block and raises Unauthenticated or PermissionDenied at the first check that the caller fails."""
    if caller.check is None:
        yield
        return
    refusals: list[Exception] = []
    try:
        async with asyncio.timeout(None) as ended, beside(_recheck(caller, ended, refusals), "recheck key"):
            yield
    except TimeoutError:
        if not ended.expired():
            raise
        raise refusals[0] from None


async def _recheck(caller: Caller, ended: asyncio.Timeout, refusals: list[Exception]) -> None:
    while caller.check is not None:
        await asyncio.sleep(RECHECK_S)
        try:
            await caller.check()
        except (Unauthenticated, PermissionDenied) as refusal:
            refusals.append(refusal)
            ended.reschedule(asyncio.get_running_loop().time())
            return
        except Unavailable:
            # The store is away: what was known last holds.
            continue
