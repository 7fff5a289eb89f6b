"""Names of the fields in an object that a client sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from outrider.errors import InvalidRequest

_MAX_NAME_CHARS = 100


def check_names(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises InvalidRequest for the first unknown name. `where` is the path of the object."""
    for name in given:
        if name not in known:
            raise InvalidRequest(f"{where}.{name[:_MAX_NAME_CHARS]}", "unknown field")
