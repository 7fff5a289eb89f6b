"""A Llama, or a relative (families.py), whose whole step is one call into the kernels (llama/step.c), on a CPU. A head
may join features of another model with its states on the way."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.attention import Batch, KVCache
from outrider.engine.attention.interface import zeros_in_large_pages
from outrider.engine.backends.cpu.build import Kernels, KernelsMissing, Layout, load_kernels
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.quantization import Int4Linear, Int8Linear
from outrider.engine.kv.step import Row
from outrider.engine.models.adapters import Adapter
from outrider.engine.models.families import Family, Layer, head_dim, why_no_relative
from outrider.engine.models.taps import Taps
from outrider.engine_config import EngineConfig

# As in llama/model.h.
_TILE, _MAX_HEAD_DIM = 16, 256
_GATE_OUTPUTS = 32
"""gate's and up's outputs alternate in groups of at most this many: half of the widest panel."""
_PAGE = 4096
"""In bytes. Matrices begin at a page, because the kernels prefetch lines by their place in a page."""
_LONG_STEP_TOKENS = 64
"""From this many tokens on a step is bound by computing rather than reading weights, and gains from every core."""

NATIVE_QUANTIZATIONS = ("none", "int8", "int4")
# As in llama/model.h, of weights of 4 bits.
_FOUR_INPUTS, _FOUR_GROUP = 32, 8
_LOW_OUTPUTS, _MAX_RANK, _RANKS, _LOWS = 16, 256, 4, 3

_Pointer = ctypes.c_void_p


class _Weights(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("values", "scales", "sums", "bias", "grids")),
        ("group", ctypes.c_int64),
    ]


_VECTORS = (
    *("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"),
    *("query_key_norm", "cos", "sin"),
)
_MATRICES = ("qkv", "output", "gate_up", "down")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in _VECTORS),
        *((name, _Weights) for name in _MATRICES),
        *((name, _Pointer) for name in ("keys", "values")),
        ("window", ctypes.c_int64),
    ]


class _Model(ctypes.Structure):
    _sizes = ("layers", "width", "inner", "heads", "kv_heads", "head_dim", "vocab", "tiles")
    _differences = ("rotary", "query_normed", "key_normed", "gelu")
    _scales = ("norm_eps", "scale", "embedding_scale", "residual_scale", "logit_scale")
    _fields_ = [
        *((name, ctypes.c_int64) for name in (*_sizes, *_differences)),
        *((name, ctypes.c_double) for name in _scales),
        *((name, _Pointer) for name in ("embedding", "final_norm")),
        ("head", _Weights),
        ("layer", _Pointer),
        ("join", _Weights),
        *((name, _Pointer) for name in ("state_norm", "feature_norm")),
        ("joined", ctypes.c_int64),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "wanted", "threads", "tapped", "taps")),
        ("attended_width", ctypes.c_int64),
        *((name, _Pointer) for name in ("token_ids", "positions", "logit_rows", "row", "tiles", "slots", "path")),
        *((name, _Pointer) for name in ("tapped_rows", "tap", "states", "entering", "attended", "features")),
        *((name, _Pointer) for name in ("adapter", "low")),
    ]


class _Low(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("rank", "first", "outputs")),
    ]


class _Projection(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "states", "width", "outputs", "threads")),
        ("norm_eps", ctypes.c_double),
        *((name, _Pointer) for name in ("norms", "in", "out")),
        ("weights", _Weights),
    ]


_BUFFERS = ("x", "wide", "narrow", "inner", "hidden", "logits", "panels", "codes", "units", "blocks", "more")


class _Buffers(ctypes.Structure):
    _fields_ = [(name, _Pointer) for name in _BUFFERS]


def runs_natively(config: EngineConfig) -> bool:
    """Whether the kernels are available and the configuration allows them. They have their own attention."""
    return why_not_native(config) is None


def why_not_native(config: EngineConfig, model: Any = None) -> str | None:
    """None if the kernels can run it. `model`: its transformers config; without it any supported model is assumed."""
    if config.execution not in ("auto", "native"):
        return f"execution is {config.execution}"
    if config.attention != "auto":
        return f"attention is {config.attention}"
    if config.quantization not in NATIVE_QUANTIZATIONS:
        return f"they do not multiply {config.quantization}"
    if (config.device, config.dtype) != ("cpu", "bfloat16"):
        return f"they run bfloat16 on cpu, not {config.dtype} on {config.device}"
    try:
        load_kernels(config.native_variant)
    except KernelsMissing as error:
        return str(error)
    return None if model is None else _why_not_this(model, config.block_size)


def can_run_natively(model: Any, block_size: int) -> bool:
    """Whether the kernels support this loaded model. See also runs_natively."""
    return _why_not_this(model.config, block_size) is None


def _why_not_this(model: Any, block_size: int) -> str | None:
    if (reason := why_no_relative(model)) is not None:
        return reason
    limits = {
        "block_size": block_size % _TILE == 0,
        "hidden_size": model.hidden_size % 16 == 0,
        "intermediate_size": model.intermediate_size % _GATE_OUTPUTS == 0,
        "head_dim": head_dim(model) % 16 == 0 and head_dim(model) <= _MAX_HEAD_DIM,
    }
    wrong = [name for name, fits in limits.items() if not fits]
    return f"they do not take its {', '.join(wrong)}" if wrong else None


@dataclass(frozen=True, slots=True)
class _Linear:
    """Packed weights of one matrix product."""

    values: Tensor
    """[outputs / panel, inputs / group, panel, group], outputs padded with zeros; bfloat16, or int8 if there are
    scales, or two of 4 bits in a byte if there are grids. Panel and group are the variant's."""
    scales: Tensor | None = None
    """[padded outputs] float32."""
    sums: Tensor | None = None
    """[padded outputs] int32: sum of each output's weights. If given, inputs are rounded to 8 bits too."""
    bias: Tensor | None = None
    """[padded outputs] float32."""
    grids: Tensor | None = None
    """[outputs / panel, inputs / grid_group, 2, panel] float16: scales and zeros."""
    grid_group: int = 0

    def pointers(self) -> _Weights:
        tensors = (self.values, self.scales, self.sums, self.bias, self.grids)
        return _Weights(*map(_address, tensors), self.grid_group)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class _PackedLayer:
    vectors: tuple[Tensor | None, ...]
    """In the order of _VECTORS; float32."""
    matrices: tuple[_Linear, ...]
    """In the order of _MATRICES."""
    window: int
    """0: none."""


@dataclass(slots=True)
class NativeBatch:
    """A step's layout in the form that the kernels read."""

    cache: KVCache
    rows: Tensor
    """[chains, 7] int32: first token, number of tokens, kv_len, index of its row's first tile in `tiles`, the position
    from which it reads `path`, its first slot's index there, and how many tokens its branches have; -1 for a branch."""
    tiles: Tensor
    """[tiles of all rows] int32: index in the cache of each tile of 16 positions."""
    slots: Tensor
    """[tokens] int32: where each token's keys and values are written."""
    path: Tensor
    """[own positions of all branches] int32: slots."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        """Never called: a native step computes attention itself."""
        raise NotImplementedError


class NativeAttention:
    """Lays out steps for NativeLlama. Keys and values are stored in the kernels' order, not in KVCache's."""

    def __init__(self, kernels: Kernels) -> None:
        self._move = kernels.library.outrider_move

    def prepare(self, rows: list[Row], cache: KVCache) -> NativeBatch:
        """Lays out a step. Rows are in the order of the flat batch."""
        tiles: list[int] = []
        chains: list[list[int]] = []
        slots: list[int] = []
        path: list[int] = []
        for row in rows:
            for chain in row.chains():
                branch_tokens = -1 if chain.path else row.num_tokens - chain.num_tokens
                place = [chain.start, chain.num_tokens, chain.kv_len, len(tiles), chain.fork, len(path)]
                chains.append([*place, branch_tokens])
                path.extend(chain.path)
            tiles.extend(_tiles(row))
            slots.extend(row.written_slots())
        as_int32 = (torch.tensor(values, dtype=torch.int32) for values in (chains, tiles, slots, path))
        return NativeBatch(cache, *as_int32)

    def move(self, moves: Sequence[tuple[int, int]], cache: KVCache) -> None:
        flat = torch.tensor(moves, dtype=torch.int64)
        layers, heads, slots, dim = cache.all_keys.shape
        arrays = (_Pointer(x.data_ptr()) for x in (cache.all_keys, cache.all_values, flat))
        self._move(*arrays, *map(ctypes.c_int64, (len(moves), layers * heads, slots // _TILE, dim)))


def _tiles(row: Row) -> Sequence[int]:
    each = row.block_size // _TILE
    return row.blocks if each == 1 else [block * each + i for block in row.blocks for i in range(each)]


class Join(nn.Module):
    """What a head does before one of its layers: of each token's state and a feature, both normed, it makes a state."""

    def __init__(self, linear: nn.Module, state_norm: Tensor | None, feature_norm: Tensor, before: int) -> None:
        super().__init__()
        self.linear = linear
        self.norms = tuple(None if norm is None else norm.float() for norm in (state_norm, feature_norm))
        self.before = before


class Projection:
    """What a head reads of several states of each token: each normed, if there are norms, and all multiplied by one
    matrix of 8 bits, whose inputs are not rounded."""

    def __init__(self, kernels: Kernels, linear: nn.Linear, norms: Sequence[Tensor], eps: float, states: int) -> None:
        eight = nn.Sequential(Int8Linear.of(linear))
        self._project, self._layout = kernels.library.outrider_project, kernels.layout
        # Kept: the structure has only its addresses.
        self._packed = _Packer(eight, kernels.layout).pack(eight[0])
        self._weights = self._packed.pointers()
        self._norms = torch.stack([norm.float() for norm in norms]) if norms else None
        self._eps, self._states = eps, states
        self._outputs, self._inputs = linear.weight.shape

    def __call__(self, states: Tensor) -> Tensor:
        """[…, states · width] → float32 […, outputs]."""
        rows = states.reshape(-1, self._inputs).float().contiguous()
        out = torch.empty(len(rows), self._outputs)
        threads, layout = torch.get_num_threads(), self._layout
        narrow = torch.empty(rows.numel() * layout.act_bytes, dtype=torch.uint8)
        panels = torch.empty(threads * layout.panel * self._inputs * layout.wide_bytes, dtype=torch.uint8)
        sizes = (len(rows), self._states, self._inputs // self._states, self._outputs, threads)
        step = _Projection(*sizes, self._eps, *map(_address, (self._norms, rows, out)), self._weights)
        buffers = _Buffers(narrow=narrow.data_ptr(), panels=panels.data_ptr())
        self._project(ctypes.byref(step), ctypes.byref(buffers))
        return out.view(*states.shape[:-1], self._outputs)


class NativeLlama:
    """Takes over the model's weights, packed for the kernels."""

    def __init__(self, kernels: Kernels, model: Any, max_context_len: int, prefill_threads: int = 0) -> None:
        """model: a head's has a `Join` as `join`. prefill_threads: of long steps, if more than torch's."""
        # W4A8: inputs of weights of 4 bits are rounded to 8.
        fours = any(isinstance(module, Int4Linear) for module in model.modules())
        self.execution = f"native-{kernels.variant}-w4a8" if fours else f"native-{kernels.variant}"
        self._forward = kernels.library.outrider_forward
        self._layout = layout = kernels.layout
        self._act = torch.bfloat16 if layout.act_bytes == 2 else torch.float32
        self._prefill_threads = prefill_threads
        family = Family.of(model)
        self._embedding = family.embedding.contiguous()
        self._norm = family.norm.float()
        packer = _Packer(model, layout)
        # Packed in the order in which a step reads them.
        layers = list(family.layers(max_context_len))
        self._places = _places(model, layers)
        self._layers = [packer.layer(layer, family) for layer in layers]
        self._head, self._vocab = packer.pack(family.head), family.head.weight.shape[0]
        join: Join | None = getattr(model, "join", None)
        self._join = None if join is None else (packer.pack(join.linear), join.norms, join.before)
        self._width, self._inner = family.width, family.inner
        self._queries = family.heads * family.head_dim
        self._joined = self._queries + 2 * family.kv_heads * family.head_dim
        self._most_outputs = max(self._width, self._joined, 2 * self._inner) + layout.panel
        sizes = (len(layers), family.width, family.inner, family.heads, family.kv_heads, family.head_dim, self._vocab)
        self._sizes: tuple[int, ...] = sizes
        self._differences = (*_rotated_and_normed(layers, family), family.gelu)
        scales = (family.norm_eps, family.scale, family.embedding_scale, family.residual_scale, family.logit_scale)
        self._scales: tuple[float, ...] = scales
        self._scratch: dict[str, Tensor] = {}
        # A weak reference: the cache is the engine's, and all tensors that a decoder holds count as its weights.
        self._bound: Callable[[], KVCache | None] = lambda: None
        self._model = _Model()
        self._layer_table: Any = None
        self.of_tokens: Tensor | None = None
        self._low: Any = None
        self._low_weights: list[Tensor] = []

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        each = len(self._layers) * len(_MATRICES) * _LOWS
        table = (_Low * (len(adapters) * each))()
        weights: list[Tensor] = []
        for number, adapter in enumerate(adapters):
            for name, (a, b) in adapter.matrices.items():
                if (place := self._places.get(name)) is None or (len(b), a.shape[1]) != place.shape:
                    raise CheckpointError(
                        name, f"the model has no such matrix of {len(b)} outputs, {a.shape[1]} inputs"
                    )
                if len(a) > _MAX_RANK:
                    raise CheckpointError(name, f"an adapter of rank {len(a)}; the kernels take at most {_MAX_RANK}")
                more = -len(a) % _RANKS
                a, b = F.pad(a, (0, 0, 0, more)).bfloat16(), F.pad(b, (0, more)).bfloat16()
                pair = a.contiguous(), b.view(-1, _LOW_OUTPUTS, b.shape[1]).transpose(1, 2).contiguous()
                weights += pair
                table[number * each + place.at] = _Low(*map(_address, pair), len(a), place.first, len(b))
        self._low, self._low_weights = table, weights

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, batch: Batch, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.forward_from(token_ids, positions, rows, batch, taps)

    def forward_from(
        self,
        entering: Tensor,
        positions: Tensor,
        rows: Tensor,
        batch: Batch,
        taps: Taps | None = None,
        attended: Tensor | None = None,
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As forward. entering: token ids, or what enters the first layer, float32 [tokens, width]. attended [tokens,
        inputs]: what its attention takes instead of the norm of that. features [tokens, width]: what is joined."""
        assert isinstance(batch, NativeBatch)
        if batch.cache is not self._bound():
            self._bind(batch.cache)
        tokens, wanted, threads = len(entering), len(rows), torch.get_num_threads()
        if tokens >= _LONG_STEP_TOKENS:
            threads = max(threads, self._prefill_threads)
        layout, act = self._layout, self._act
        logits = torch.empty(wanted, -(-self._vocab // layout.panel) * layout.panel)
        hidden = torch.empty(wanted, self._width, dtype=act)
        attended = None if attended is None else attended.to(act).contiguous()
        attended_width = 0 if attended is None else attended.shape[1]
        features = None if features is None else features.float().contiguous()
        pair = 0 if features is None else 2 * self._width
        most = max(self._width, self._inner, self._queries, attended_width, pair)
        buffers = _Buffers(
            self._buffer("x", tokens * self._width, torch.float32),
            self._buffer("wide", tokens * max(self._width, self._joined), torch.float32),
            self._buffer("narrow", tokens * max(self._width, self._queries, pair), act),
            self._buffer("inner", tokens * self._inner, act),
            hidden.data_ptr(),
            logits.data_ptr(),
            # One widened panel per thread.
            self._buffer("panels", threads * layout.panel * most * layout.wide_bytes, torch.uint8),
            self._buffer("codes", tokens * most * layout.code_bytes, torch.uint8),
            self._buffer("units", tokens, torch.float32),
            self._buffer("blocks", tokens * most // _FOUR_INPUTS * layout.block_bytes, torch.uint8),
            None if self.of_tokens is None else self._buffer("more", tokens * self._most_outputs, torch.float32),
        )
        taps = taps or Taps((), torch.empty(0, dtype=torch.int64))
        tapped = torch.tensor(taps.layers, dtype=torch.int64)
        states = torch.empty(len(tapped), len(taps.rows), self._width, dtype=act)
        token_ids, given = (None, entering.contiguous()) if entering.is_floating_point() else (entering, None)
        arrays = (
            token_ids,
            positions,
            rows,
            batch.rows,
            batch.tiles,
            batch.slots,
            batch.path,
            taps.rows,
            tapped,
            states,
            given,
            attended,
            features,
            self.of_tokens,
        )
        counts = (tokens, len(batch.rows), wanted, threads, len(taps.rows), len(tapped))
        low = None if self._low is None else ctypes.addressof(self._low)
        step = _Step(*counts, attended_width, *map(_address, arrays), low)
        self._forward(ctypes.byref(self._model), ctypes.byref(step), ctypes.byref(buffers))
        for number, found in zip(taps.layers, states, strict=True):
            if number <= len(self._layers):
                taps.found[number] = found
        return logits[:, : self._vocab], hidden

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> int:
        """Address of scratch memory for at least `size` elements. It only grows."""
        have = self._scratch.get(name)
        if have is None or have.numel() < size:
            have = self._scratch[name] = torch.empty(size, dtype=dtype)
        return have.data_ptr()

    def _bind(self, cache: KVCache) -> None:
        rows = [
            _Layer(
                *map(_address, layer.vectors),
                *(linear.pointers() for linear in layer.matrices),
                *(keys.data_ptr(), values.data_ptr(), layer.window),
            )
            for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True)
        ]
        self._layer_table = (_Layer * len(rows))(*rows)
        self._bound = weakref.ref(cache)
        self._model = _Model(
            *(*self._sizes, cache.keys[0].shape[1] // _TILE),
            *self._differences,
            *self._scales,
            *(x.data_ptr() for x in (self._embedding, self._norm)),
            self._head.pointers(),
            ctypes.addressof(self._layer_table),
            *(() if self._join is None else self._joining(*self._join)),
        )

    @staticmethod
    def _joining(linear: _Linear, norms: Sequence[Tensor | None], before: int) -> tuple[Any, ...]:
        return linear.pointers(), *map(_address, norms), before


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the kernels look for what an adapter adds to a matrix."""

    at: int
    """In the table of one adapter."""
    first: int
    """Of its product's outputs."""
    shape: tuple[int, int]


def _places(model: nn.Module, layers: Sequence[Layer]) -> dict[str, _Place]:
    """By the matrix' name in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for number, layer in enumerate(layers):
        products = layer.qkv, (layer.output,), layer.gate_up, (layer.down,)
        for product, linears in enumerate(products):
            first = 0
            for part, linear in enumerate(linears):
                at = (number * len(_MATRICES) + product) * _LOWS + part
                outputs, inputs = linear.weight.shape
                # Of 4 bits two are in a byte.
                inputs *= 2 if isinstance(linear, Int4Linear) else 1
                found[names.get(id(linear), "")] = _Place(at, first, (outputs, inputs))
                first += outputs
    return found


def _rotated_and_normed(layers: list[Layer], family: Family) -> tuple[int, int, int]:
    """Numbers of a head that are rotated; of all queries, and of all keys, that are normed together."""
    rotary = next((layer.rotary for layer in layers if layer.rotary is not None), None)
    norms = (layers[0].query_norm, layers[0].key_norm)
    query, key = (family.head_dim if norm is None else len(norm) for norm in norms)
    return 0 if rotary is None else 2 * rotary[0].shape[-1], query, key


def _query_key_norm(layer: Layer, family: Family) -> Tensor | None:
    """Of all heads, though they may share the weights of one."""
    if layer.query_norm is None or layer.key_norm is None:
        return None
    of_heads = ((layer.query_norm, family.heads), (layer.key_norm, family.kv_heads))
    return torch.cat([norm.repeat(heads * family.head_dim // len(norm)) for norm, heads in of_heads])


class _Packer:
    """Copies weights into a variant's order, all in one stretch of large pages: most matrices alone would not fill a
    page."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        # Each matrix is padded to whole panels, and begins at a page.
        sizes = [(len(m) + layout.panel) * m.shape[1] * m.element_size() + _PAGE for m in _matrices(model)]
        self._bytes = zeros_in_large_pages(sum(sizes) + _PAGE, torch.uint8)
        self._used = -self._bytes.data_ptr() % _PAGE

    def layer(self, layer: Layer, family: Family) -> _PackedLayer:
        vectors = (
            *(layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm),
            *(_query_key_norm(layer, family), *(layer.rotary or (None, None))),
        )
        qkv, output = self.pack(*layer.qkv), self.pack(layer.output)
        gate_up = self.pack(*layer.gate_up, alternating=self._layout.panel // 2)
        floats = tuple(None if vector is None else vector.float() for vector in vectors)
        return _PackedLayer(floats, (qkv, output, gate_up, self.pack(layer.down)), layer.window or 0)

    def pack(self, *linears: Any, alternating: int = 0) -> _Linear:
        """Joins several matrices to one product. Their outputs follow one another, or both halves of all outputs
        alternate in groups of `alternating`."""
        panel = self._layout.panel

        def join(parts: list[Tensor]) -> Tensor:
            outputs = torch.cat(parts)
            if alternating:
                halves = outputs.view(2, -1, alternating, *outputs.shape[1:])
                outputs = halves.transpose(0, 1).reshape(outputs.shape)
            return F.pad(outputs, (*[0, 0] * (outputs.ndim - 1), 0, -len(outputs) % panel))

        bias = join([_bias(linear) for linear in linears]) if any(x.bias is not None for x in linears) else None
        if isinstance(linears[0], Int4Linear):
            group = math.gcd(*(linear.group for linear in linears))
            grids = join([linear.grids(group) for linear in linears])
            return _Linear(
                self._keep(self._fours(join([linear.numbers() for linear in linears]))),
                bias=bias,
                grids=self._keep(grids.view(-1, panel, *grids.shape[1:]).permute(0, 2, 3, 1)),
                grid_group=group,
            )
        weight = join([linear.weight.detach() for linear in linears])
        in_int8 = isinstance(linears[0], Int8Linear)
        rounded = in_int8 and linears[0].rounds_inputs
        group = self._layout.code_group if rounded else self._layout.eight_group if in_int8 else 2
        values = self._keep(weight.view(-1, panel, weight.shape[1] // group, group).transpose(1, 2))
        if not in_int8:
            return _Linear(values, bias=bias)
        scales = join([linear.scale.float() for linear in linears])
        return _Linear(values, scales, weight.sum(1, dtype=torch.int32) if rounded else None, bias)

    def _fours(self, numbers: Tensor) -> Tensor:
        """[outputs, inputs] of 4 bits → [outputs / panel, inputs / 8, panel, 4] bytes."""
        halves = numbers.view(-1, self._layout.panel, numbers.shape[1] // _FOUR_GROUP, 2, _FOUR_GROUP // 2)
        lower, upper = halves.transpose(1, 2).unbind(3)
        return lower | upper << 4

    def _keep(self, values: Tensor) -> Tensor:
        """A copy in the packer's memory."""
        start, size = self._used, values.numel() * values.element_size()
        self._used += -(-size // _PAGE) * _PAGE
        kept = self._bytes[start : start + size].view(values.dtype).view(values.shape)
        return kept.copy_(values)


def _matrices(model: nn.Module) -> Iterator[Tensor]:
    """What is kept of each layer, by outputs."""
    for module in model.modules():
        if isinstance(module, nn.Linear | Int8Linear | Int4Linear):
            yield module.weight
        if isinstance(module, Int4Linear):
            yield module.grids(module.group).flatten(1)


def _bias(linear: Any) -> Tensor:
    """[outputs] float32; zeros if it has none."""
    return torch.zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias.detach().float()
