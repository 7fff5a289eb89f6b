"""Opens a GGUF file. What its header counts is bounded by the file, and by what models have: a reader that believed any
count would never end.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from outrider.engine.checkpoints.checkpoints import CheckpointError

_MAX_KEYS, _MAX_TENSORS = 1 << 16, 1 << 17
_MAX_ELEMENTS = 1 << 21
"""Of all arrays of the metadata together: a vocabulary of 262,144 tokens has about a million."""


def read_gguf(file: Path) -> GGUFReader:
    """Raises CheckpointError: a truncated file would be read as garbage; the header gives its length."""
    try:
        reader = _Bounded(file)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    except Exception as error:  # the reader fails in many ways on a damaged file
        raise CheckpointError(str(file), f"not a sound GGUF file: {error}") from error
    if end == 0 or end > file.stat().st_size:
        raise CheckpointError(str(file), f"truncated: {file.stat().st_size} bytes of {end}")
    return reader


class _Bounded(GGUFReader):  # type: ignore[misc]  # It has no types.
    """Every read of GGUFReader goes through these methods of its own."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it goes on to byte {end}, and has {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)

    def _build_fields(self, offs: int, count: int) -> Any:
        _check("keys", count, _MAX_KEYS)
        self._count_elements(offs, count)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        _check("tensors", count, _MAX_TENSORS)
        return super()._build_tensor_info(offs, count)

    def _count_elements(self, at: int, num_keys: int) -> None:
        """First, as the reader takes long for each element."""
        data, order = memoryview(self.data), ">" if self.byte_order == "S" else "<"
        long, kinds = struct.Struct(f"{order}Q").unpack_from, struct.Struct(f"{order}I").unpack_from
        total = 0
        for _ in range(num_keys):
            at += 8 + long(data, at)[0]
            [kind], count = kinds(data, at), 1
            at += 4
            if kind == GGUFValueType.ARRAY:
                [kind], [count] = kinds(data, at), long(data, at + 4)
                at += 12
                if kind == GGUFValueType.ARRAY:
                    raise ValueError("its metadata has arrays of arrays")
                total += count
                _check("elements in its arrays", total, _MAX_ELEMENTS)
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    at += 8 + long(data, at)[0]
            else:
                at += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)]).itemsize
            if at > len(self.data):
                raise ValueError(f"it goes on to byte {at}, and has {len(self.data)}")


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{count} {what}; at most {most} are read")
