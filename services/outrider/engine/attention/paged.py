"""Paged attention for GPUs: Triton kernels over the block table, keys split among programs ("flash decoding").

Queries that share a key head are folded into one tile, so keys are read once for all of them. A row may have any
number of queries, and end in a tree. Rows of few queries (decoding, verification) have their keys split: key tile
number n belongs to split n modulo NUM_SPLITS, so the order of the sums depends only on a query's position. For such
rows the output for a token therefore does not depend on the batch: neither on the other sequences of the step, nor on
how many tokens are verified with it, as a chain or as a tree, nor on whether the step is recorded. A prefill chunk of
more than SMALL_SPAN queries uses larger tiles and no split, and may round differently.

The Triton kernels are in `paged_kernels.py`, which is imported only when an attention is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from outrider.engine.attention.interface import KVCache, Windows
from outrider.engine.attention.layout import TILE_FIELDS, TOKEN_FIELDS, Fields, fill, num_tiles
from outrider.engine.kv.step import Row

NUM_SPLITS = 16
"""With eight key heads one sequence occupies 128 programs, about the multiprocessors of a large GPU."""
SMALL_SPAN = 64
"""Rows with at most this many queries have their keys split."""
MAX_HEAD_DIM = 256
"""Tiles of larger heads do not fit the registers and the shared memory of any card."""
_FIRST_CAPABILITY = (8, 0)
"""The first with tensor cores for bfloat16. The kernels are compiled for no card before."""
_TILE_ROWS_SMALL, _TILE_ROWS_LARGE = 16, 64


class TritonMissing(ValueError):
    """The Triton package is not installed, or cannot run here."""


def load_kernels(device: torch.device) -> ModuleType:
    """The kernels. Raises TritonMissing if they cannot run: without the package, or without a GPU of 8.0 or more."""
    try:
        from outrider.engine.attention import paged_kernels
    except ImportError as error:
        raise TritonMissing(f"attention: triton is not installed here ({error}); sdpa needs no package") from error
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        raise TritonMissing(f"attention: triton runs on CUDA devices, not on {device}; sdpa runs on any")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _FIRST_CAPABILITY:
        has = ".".join(map(str, found))
        raise TritonMissing(f"attention: triton needs compute capability 8.0 or more, {device} has {has}; use sdpa")
    return paged_kernels


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's attention on this device."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: {self.heads} is not a multiple of {self.kv_heads} key heads")

    @property
    def share(self) -> int:
        """Query heads of one key head."""
        return self.heads // self.kv_heads

    @property
    def head_padded(self) -> int:
        return max(16, _power_of_two(self.head_dim))

    @property
    def tile_keys(self) -> int:
        """Keys of one tile. Tiles of 64 keys of 256 numbers do not fit the shared memory of an L4, A10 or RTX 4090."""
        return 32 if self.head_padded == MAX_HEAD_DIM else 64

    def launch(self, least_rows: int, dtype: torch.dtype) -> dict[str, int]:
        """How many warps run a tile, and how many of its loads are under way at a time.

        Four warps spill the registers of a large tile, and of large heads in float32; a third load those of a small
        tile of small heads. In float32 a second load does not fit the shared memory of small cards.
        """
        if dtype == torch.float32:
            return {"num_warps": 4 if self.head_padded <= 64 else 8, "num_stages": 1}
        if least_rows == _TILE_ROWS_LARGE:
            return {"num_warps": 8, "num_stages": 3}
        return {"num_warps": 4, "num_stages": 2 if self.head_padded <= 64 else 3}

    def tile_rows(self, least: int) -> int:
        return max(least, _power_of_two(self.share))

    def tile_queries(self, least: int) -> int:
        """Queries of one tile of at least `least` rows."""
        return self.tile_rows(least) // self.share


def _rows_of_many(dtype: torch.dtype) -> int:
    """Rows of a prefill's tiles. Larger float32 tiles do not fit a multiprocessor's shared memory."""
    return _TILE_ROWS_SMALL if dtype == torch.float32 else _TILE_ROWS_LARGE


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class TritonAttention:
    """Attention by our kernels; see the module."""

    def __init__(self, shape: Shape, device: torch.device, windows: Windows = ()) -> None:
        """Raises ValueError that names what of the model it does not run, or TritonMissing."""
        if shape.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim: {shape.head_dim} is more than the {MAX_HEAD_DIM} that attention runs on GPUs")
        self.shape = shape
        self._windows = windows
        self._kernels = load_kernels(device)
        self._pinned = device.type == "cuda"

    def prepare(self, rows: list[Row], cache: KVCache) -> TritonBatch:
        """Lays out a step of any size, in one copy to the device. Rows are in order."""
        # A tree that comes with a long text, which is rare, needs no kernel of its own: there are none of large tiles.
        few = [row for row in rows if row.num_tokens <= SMALL_SPAN or row.tree]
        many = [row for row in rows if row.num_tokens > SMALL_SPAN and not row.tree]
        groups = [(few, self.tile_queries), (many, self.shape.tile_queries(_rows_of_many(cache.keys[0].dtype)))]
        tiles = [num_tiles(*group) for group in groups]
        fields = Fields.of(
            tokens=sum(row.num_tokens for row in rows),
            tiles=sum(tiles),
            blocks=sum(len(row.blocks) for row in rows),
        )
        buffer = torch.empty(fields.total, dtype=torch.int64, pin_memory=self._pinned)
        slices = fields.slices()
        numbers = buffer.numpy()
        fill({name: numbers[at] for name, at in slices.items()}, groups)
        on_device = buffer.to(cache.keys[0].device, non_blocking=True)
        views = {name: on_device[at] for name, at in slices.items()}
        splits = min(NUM_SPLITS, -(-max((row.kv_len for row in few), default=0) // self.shape.tile_keys))
        return self.batch(views, cache, tiles, splits=splits)

    def move(self, moves: Sequence[tuple[int, int]], cache: KVCache) -> None:
        cache.move(moves)

    @property
    def tile_queries(self) -> int:
        """Queries of one tile, in rows of few queries."""
        return self.shape.tile_queries(_TILE_ROWS_SMALL)

    def batch(
        self,
        views: dict[str, Tensor],
        cache: KVCache,
        tiles: Sequence[int],
        *,
        splits: int = NUM_SPLITS,
        workspace: Workspace | None = None,
    ) -> TritonBatch:
        """A step whose layout is on the device already. `tiles`: the numbers of tiles of few queries and of many.

        `splits`: how many splits have keys; all, unless the contexts are known to be short. With a workspace nothing is
        allocated, and the rows of padding tokens in it are not written.
        """
        return TritonBatch(self.shape, self._kernels, cache, views, (*tiles, 0)[:2], splits, workspace, self._windows)

    def workspace(self, tokens: int, cache: KVCache) -> Workspace:
        """A workspace for steps of at most this many tokens, in rows of few queries."""
        return Workspace.allocate(self.shape, tokens, cache.keys[0])


@dataclass(frozen=True, slots=True)
class Workspace:
    """The buffers that a step writes besides the cache. One workspace serves all layers in turn."""

    out: Tensor
    """[tokens, heads * head_dim]"""
    partial: Tensor
    """float32 [tokens, heads, splits, head_padded]: sums of values, not yet divided."""
    partial_max: Tensor
    """float32 [tokens, heads, splits]"""
    partial_sum: Tensor

    @staticmethod
    def num_bytes(shape: Shape, tokens: int, itemsize: int) -> int:
        """Of a workspace with splits."""
        partial = 4 * NUM_SPLITS * (shape.head_padded + 2)
        return tokens * shape.heads * (shape.head_dim * itemsize + partial)

    @classmethod
    def allocate(cls, shape: Shape, tokens: int, like: Tensor, *, split: bool = True) -> Workspace:
        device = like.device
        stats = (tokens, shape.heads, NUM_SPLITS) if split else (0,)
        # Zeroed: padding tokens are never written, and later operations must not read NaN there.
        out = torch.zeros(tokens, shape.heads * shape.head_dim, dtype=like.dtype, device=device)
        partial = torch.empty((*stats, shape.head_padded), dtype=torch.float32, device=device)
        maxima, sums = (torch.empty(stats, dtype=torch.float32, device=device) for _ in range(2))
        return cls(out, partial, maxima, sums)


class TritonBatch:
    """One step's layout on the device, over the cache."""

    def __init__(
        self,
        shape: Shape,
        kernels: ModuleType,
        cache: KVCache,
        views: dict[str, Tensor],
        tiles: tuple[int, ...],
        splits: int,
        workspace: Workspace | None,
        windows: Windows = (),
    ) -> None:
        self.views = views
        self._shape = shape
        self._kernels = kernels
        self._cache = cache
        self._few, self._many = tiles
        self._splits = splits
        self._workspace = workspace
        self._windows = windows

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        self.store(key, value, layer)
        return self.look(query, layer, scale)

    def cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, for a kernel that writes this step's own to them."""
        return self._cache.keys[layer], self._cache.values[layer]

    def store(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Writes key and value [tokens, kv_heads, head_dim] to the cache."""
        shape, (keys, values) = self._shape, self.cached(layer)
        key, value = _rows(key), _rows(value)
        self._kernels.store_kernel[(key.shape[0],)](
            key,
            value,
            keys,
            values,
            self.views["slots"],
            *key.stride()[:2],
            *value.stride()[:2],
            keys.stride(0),
            KV_HEADS=shape.kv_heads,
            KV_HEADS_PADDED=_power_of_two(shape.kv_heads),
            HEAD_DIM=shape.head_dim,
            HEAD_PADDED=shape.head_padded,
        )

    def look(self, query: Tensor, layer: int, scale: float) -> Tensor:
        """Attention over the cache, including this step's tokens. The next layer's call overwrites the result."""
        query = _rows(query)
        if self._workspace is None:
            self._workspace = Workspace.allocate(self._shape, query.shape[0], query, split=self._few > 0)
        work = self._workspace
        if self._few:
            self._launch(query, layer, scale, slice(0, self._few), _TILE_ROWS_SMALL)
            self._reduce(query.shape[0])
        if self._many:
            rows = _rows_of_many(self.cached(layer)[0].dtype)
            self._launch(query, layer, scale, slice(self._few, None), rows, split=False)
        return work.out[: query.shape[0]]

    def _launch(
        self, query: Tensor, layer: int, scale: float, tiles: slice, least_rows: int, *, split: bool = True
    ) -> None:
        shape, work, views = self._shape, self._work, self.views
        keys, values = self.cached(layer)
        at_tile = [views[name][tiles] for name in TILE_FIELDS]
        grid = (at_tile[0].shape[0], shape.kv_heads, self._splits if split else 1)
        self._kernels.attend_kernel[grid](
            query,
            keys,
            values,
            work.out,
            work.partial,
            work.partial_max,
            work.partial_sum,
            *at_tile,
            views["blocks"],
            views["visible"],
            views["own_mask"],
            scale * math.log2(math.e),
            *query.stride()[:2],
            keys.stride(0),
            SHARE=shape.share,
            HEADS=shape.heads,
            HEAD_DIM=shape.head_dim,
            HEAD_PADDED=shape.head_padded,
            BLOCK_SIZE=shape.block_size,
            TILE_ROWS=shape.tile_rows(least_rows),
            TILE_KEYS=shape.tile_keys,
            NUM_SPLITS=NUM_SPLITS if split else 1,
            WINDOW=(self._windows[layer] if self._windows else None) or 0,
            WIDEN=keys.device.type == "cpu",
            **shape.launch(least_rows, keys.dtype),
        )

    def _reduce(self, tokens: int) -> None:
        shape, work = self._shape, self._work
        self._kernels.reduce_kernel[(tokens, shape.heads)](
            work.partial,
            work.partial_max,
            work.partial_sum,
            self.views["split"],
            work.out,
            HEADS=shape.heads,
            HEAD_DIM=shape.head_dim,
            HEAD_PADDED=shape.head_padded,
            TILE_KEYS=shape.tile_keys,
            NUM_SPLITS=NUM_SPLITS,
        )

    @property
    def _work(self) -> Workspace:
        if self._workspace is None:
            raise AssertionError("a workspace is there once a layer has looked")
        return self._workspace


def _rows(x: Tensor) -> Tensor:
    """The kernels take any strides of heads and tokens, but need head_dim contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


__all__ = [
    "NUM_SPLITS",
    "SMALL_SPAN",
    "TOKEN_FIELDS",
    "Shape",
    "TritonAttention",
    "TritonBatch",
    "TritonMissing",
    "Workspace",
]
