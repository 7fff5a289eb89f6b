"""What every part of the metadata store has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.metadata.keys import Keys

if TYPE_CHECKING:
    from outrider.metadata.connection.link import RedisLink


class StorePart:
    """Owned by one event loop."""

    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link = link
        self._keys = keys
