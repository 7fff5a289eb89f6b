"""Which prefixes vLLM's cache holds, under the names that routers use: `outrider.prefix`. From vLLM's own KV events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from outrider.prefix import block_hashes


class CachedPrefixes:
    """Takes the place of vLLM's publisher of KV events. Our names of the blocks by vLLM's."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[Any, bytes] = {}
        self._changes: dict[bytes, bool] = {}

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    self._changes.update(dict.fromkeys(self._stored(event), True))
                case BlockRemoved():
                    self._changes.update(dict.fromkeys(self._removed(event.block_hashes), False))
                case AllBlocksCleared():
                    self._changes.update(dict.fromkeys(self._removed(list(self._names)), False))

    def shutdown(self) -> None: ...

    def get_publisher_config(self) -> None: ...

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """The names added and removed since the last call."""
        changes, self._changes = self._changes, {}
        return [name for name, held in changes.items() if held], [name for name, held in changes.items() if not held]

    def _stored(self, event: BlockStored) -> list[bytes]:
        if event.block_size != self._block_size or event.lora_name is not None:
            return []
        parent = None
        if event.parent_block_hash is not None and (parent := self._names.get(event.parent_block_hash)) is None:
            return []
        names = block_hashes(event.token_ids, self._block_size, _salt(event), parent=parent)
        self._names.update(zip(event.block_hashes, names, strict=True))
        return names

    def _removed(self, hashes: Iterable[Any]) -> Iterator[bytes]:
        for one in hashes:
            if (name := self._names.pop(one, None)) is not None:
                yield name


def _salt(event: BlockStored) -> bytes:
    """The tenant's salt, which vLLM mixes into the first block of a prompt."""
    extra = (event.extra_keys or [None])[0]
    return bytes.fromhex(extra[0]) if extra else b""
