"""What is read from an answer of the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Work: TypeAlias = Callable[[Any], Awaitable[T]]
"""What a call does with the client: redis-py types its commands as awaitable or not, so the client is Any here."""


class MalformedError(Exception):
    """Of an answer, in the error that caused this one."""


def reading(work: Work[Any], read: Callable[[Any], T]) -> Work[T]:
    """What `read` makes of the answer to `work`. One of which it can make nothing counts as no answer."""

    async def both(client: Any) -> T:
        answer = await work(client)
        try:
            return read(answer)
        except Exception as error:
            raise MalformedError from error

    return both
