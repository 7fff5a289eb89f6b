"""What is left of a text in the memory of a process: as characters, and as tokens in each form that is in use."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

OVERWRITING = {
    "PYTHONMALLOC": "malloc",
    "MALLOC_PERTURB_": "165",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}
"""In a process's environment: it overwrites what it frees, so that only what it holds is found."""
_PIECE, _OVERLAP = 16 << 20, 4096
_WRITABLE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw")
_POINTER_STEP = 32
"""CPython has its small integers in a row: a list of them is pointers that differ as the integers do."""


class Mark:
    """A text whose every byte is a token, and those tokens, which are below 256."""

    def __init__(self, text: str, token_ids: Sequence[int]) -> None:
        self._forms = {"text": text.encode(), "wide text": text.encode("utf-32-le")}
        self._forms["varints"] = b"".join(map(_varint, token_ids))
        for width in "HIQ":
            self._forms[f"{8 * struct.calcsize(width)} bits"] = struct.pack(f"<{len(token_ids)}{width}", *token_ids)
        self._forms |= {f"written with {comma!r}": comma.join(map(str, token_ids)).encode() for comma in (",", ", ")}
        self._steps = np.diff(np.array(token_ids)) * _POINTER_STEP

    def places(self, pid: int) -> list[str]:
        """In all memory that the process can write to, which goes on meanwhile: the form, and what is around it."""
        found: list[str] = []
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            for start, end in _regions(pid):
                for at in range(start, end, _PIECE):
                    memory.seek(at)
                    try:
                        data = memory.read(min(_PIECE + _OVERLAP, end - at))
                    except OSError:
                        continue
                    found += [
                        f"{form} at {at + place:x}: {data[max(0, place - 96) : place + 96]!r}"
                        for form, place in self._found(data)
                        if place < _PIECE
                    ]
        return found

    def _found(self, data: bytes) -> Iterator[tuple[str, int]]:
        for name, form in self._forms.items():
            yield from ((name, match.start()) for match in re.finditer(re.escape(form), data))
        steps = np.diff(np.frombuffer(data, np.int64, len(data) // 8))
        places = np.flatnonzero(steps[: len(steps) - len(self._steps) + 1] == self._steps[0])
        for number, step in enumerate(self._steps):
            places = places[steps[places + number] == step]
        yield from (("pointers", 8 * int(place)) for place in places)


def _regions(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if match := _WRITABLE.match(line):
            yield int(match[1], 16), int(match[2], 16)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128, value >> 7])
