"""A store that lies: a real Redis answers, and some of its answers are falsified on their way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

_LATE_S = 1.5
"""Longer than any caller waits."""
_FLOOD = b"x" * (1 << 20)


@dataclass(slots=True, eq=False)
class LyingStore:
    rng: random.Random
    upstream: str
    """The real server's socket."""
    share: float = 0.0
    """Of the answers, which it falsifies."""
    kinds: tuple[str, ...] = ()
    url: str = ""
    num_lies: dict[str, int] = field(default_factory=dict)
    connections: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(task := asyncio.create_task(self._forward(reader, writer)))
        task.add_done_callback(self.connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            answers, upstream = await asyncio.open_unix_connection(self.upstream, limit=1 << 26)
            passing = asyncio.create_task(_passed(reader, upstream))
            try:
                while True:
                    await self._say(await _answer(answers), writer)
            finally:
                passing.cancel()
                upstream.close()
                writer.close()

    async def _say(self, true: bytes, writer: asyncio.StreamWriter) -> None:
        said = true
        if self.rng.random() < self.share:
            kind = self.rng.choice(self.kinds)
            self.num_lies[kind] = self.num_lies.get(kind, 0) + 1
            if kind == "late":
                await asyncio.sleep(_LATE_S)
            elif kind == "flood":
                writer.write(b"$1099511627776\r\n")
                while True:
                    writer.write(_FLOOD)
                    await writer.drain()
            elif kind == "closed":
                raise ConnectionResetError
            else:
                said = LIES[kind](true, self.rng)
        writer.write(said)
        await writer.drain()


def _garbage(true: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 200))


def _changed(true: bytes, rng: random.Random) -> bytes:
    """Of the same form, with other bytes: damaged records, numbers, names."""
    changed = bytearray(true)
    for place in rng.sample(range(len(true)), min(len(true), 1 + len(true) // 20)):
        changed[place] = changed[place] if changed[place] in b"*$:+-\r\n" else rng.choice(b"0159\x00\xff\x80a")
    return bytes(changed)


_TYPES = """
    :0 :1 :-1 :5 :18446744073709551616 +OK +QUEUED $-1 *-1 *0 $0| $3|nan $3|inf $3|\xff\xfe\x81 *1|:1 *1|*0
    *2|$1|a|$1|b *3|*0|*-1|:7 *7|:0|:1|$0||$0||$1|0|$0||:0 *1|*2|$3|1-0|*-1 *2|:9|-ERR *5|$1|1|$3|nan|$1|1|$1|1|$1|1
    -ERR -READONLY -MOVED -WRONGTYPE -NOAUTH -LOADING -OOM -EXECABORT -NOSCRIPT -MASTERDOWN -\xff\xfe
"""


def _of_another_type(true: bytes, rng: random.Random) -> bytes:
    return rng.choice(_TYPES.split()).replace("|", "\r\n").encode("latin-1") + b"\r\n"


LIES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "type": _of_another_type,
    "garbage": _garbage,
    "changed": _changed,
    "cut": lambda true, rng: true[: rng.randrange(len(true))],
    "twice": lambda true, rng: true + true,
    "long": lambda true, rng: b"$1099511627776\r\n" + true,
    "negative": lambda true, rng: rng.choice((b"$-5\r\n", b"*-7\r\n")) + true,
    "many": lambda true, rng: b"*2147483647\r\n" + true,
    "deep": lambda true, rng: b"*1\r\n" * 5000 + true,
}
KINDS = (*LIES, "late", "flood", "closed")


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """One whole answer of the real server."""
    line = await reader.readuntil(b"\r\n")
    kind, number = line[:1], line[1:-2]
    if kind == b"$" and number != b"-1":
        return line + await reader.readexactly(int(number) + 2)
    if kind == b"*":
        return line + b"".join([await _answer(reader) for _ in range(max(0, int(number)))])
    return line


async def _passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def lying_store(upstream: str, seed: int) -> AsyncIterator[LyingStore]:
    store = LyingStore(random.Random(seed), upstream, kinds=KINDS)
    server = await asyncio.start_server(store.accept, "127.0.0.1")
    try:
        store.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield store
    finally:
        server.close()
        for connection in store.connections:
            connection.cancel()
