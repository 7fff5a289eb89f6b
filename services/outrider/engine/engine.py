"""The engine: sequences in, logits out. Owned by one thread.

It lays out steps and runs them, and keeps keys and values for the tokens it is given: the caller decides which tokens
are committed and which come next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.engine.attention import Attention, KVCache, SdpaAttention
from outrider.engine.kv.kv_cache_manager import KVCacheManager
from outrider.engine.kv.step import Row, Step
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.memory import held_bytes
from outrider.engine.models.taps import Taps
from outrider.engine.run.buckets import choose
from outrider.engine_config import EngineConfig
from outrider.speculation.warm_up import warm_up_verdicts

if TYPE_CHECKING:
    from outrider.engine.run.graphs import GraphRunner

from pathlib import Path

from outrider.engine.checkpoints.checkpoints import CheckpointError, weights_revision
from outrider.engine.models.adapters import Adaptable, Adapter

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = (1, 17, 33, 65)
"""Each has another tile of products; the last one, which comes as a long prompt does, another one of attention."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    vocab_size: int
    """Token ids are below this. Logits may cover fewer tokens: see Engine.token_map."""
    max_context_len: int
    block_size: int = 0
    """Tokens in one KV block; 0 when there is no KV cache."""
    num_blocks: int = 0
    dtype: str = ""
    device: str = "cpu"
    execution: str = ""
    """Implementation of a step, as in Decoder. Another one rounds differently, and may continue a text differently."""
    eos_token_ids: tuple[int, ...] = ()


class DeviceLost(Exception):
    """The device of an engine fails whatever it is asked. Only a new process gets it back."""


class Engine:
    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        info: ModelInfo,
        config: EngineConfig,
        token_map: Tensor | None = None,
        *,
        attention: Attention | None = None,
        graphs: GraphRunner | None = None,
    ) -> None:
        self.info = info
        self.kv = KVCacheManager(info.num_blocks, info.block_size, prefix_cache=config.prefix_cache)
        self.token_map = token_map
        """[logits width] int64: the token id of each logit, or None when logits cover the vocabulary."""
        self._decoder = decoder
        self._cache = cache
        self._device = torch.device(config.device)
        self._max_batch_tokens = config.max_batch_tokens
        self._attention = attention or SdpaAttention()
        self._graphs = graphs
        self._adapted: Adaptable | None = None

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """From now on a sequence may have one of these, by its number. Raises CheckpointError."""
        decoder: Any = self._decoder
        if not hasattr(decoder, "adapt") or self._graphs is not None:
            raise CheckpointError("execution", f"{self.info.execution} applies no adapters; transformers does")
        decoder.adapt(adapters)
        self._adapted = decoder

    def num_free_tokens(self, num_rows: int, num_tokens: int) -> int:
        """How many more tokens a recorded step of this many sequences and tokens would run in the same time."""
        if self._graphs is None:
            return 0
        bucket = choose(self._graphs.buckets, num_rows, num_tokens)
        return 0 if bucket is None else bucket.tokens - num_tokens

    @property
    def records(self) -> bool:
        """Whether steps are recorded, on a GPU."""
        return self._graphs is not None

    @property
    def weight_bytes(self) -> int:
        """Memory of the model as it is run, including its tables."""
        return held_bytes(self._decoder)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one position, over all layers."""
        cache = self._cache
        return sum(int(t.shape[0] * t.shape[2]) * t.element_size() for t in [*cache.keys, *cache.values])

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Runs the rows as one flat batch → float32 [logits wanted, logits width], valid until the next forward.

        Raises OutOfBlocks, with nothing changed, when the pool cannot hold them, and DeviceLost.
        """
        return self.forward_tapped(rows, ())[0]

    def forward_tapped(self, rows: Sequence[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As forward, also with the hidden states that enter these layers, [tokens tapped, len(layers) * width].

        Layers are numbered as in Taps. The tokens are the last `num_tapped` of each row, in their order.
        """
        step = self._lay_out(rows)
        with self._on_device():
            self._prepare_cache(step)
            found = self._graphs.run(step, layers) if self._graphs is not None else None
            if found is None:
                found = self._run_tapped(step, layers)
        self._advance(rows)
        return found

    def wait(self) -> None:
        """Until the device has done all that it was given. Raises DeviceLost."""
        if self._device.type == "cuda":
            self._synchronize()

    def check(self) -> None:
        """Raises what the model raises, whatever it is given."""
        self.try_step(1)

    def try_step(self, count: int) -> Tensor:
        """Runs so many tokens for themselves → their logits."""
        sequence = self.kv.open([])
        try:
            return self.forward([Row(sequence, [0] * count, count)])
        finally:
            self.kv.discard(sequence)

    def warm_up(self) -> None:
        """Of a GPU, whose kernels are compiled when they are launched for the first time: launches them in each form,
        so that none is compiled while it serves."""
        started_s, held = time.monotonic(), self.info.num_blocks * self.info.block_size
        most = min(self._max_batch_tokens, self.info.max_context_len, held)
        for count in _WARM_UP_TOKENS:
            logits = self.try_step(min(count, most))
        with self._on_device():
            warm_up_verdicts(logits)
        log.info("launched what steps launch in %.1f s", time.monotonic() - started_s)

    def record_taps(self, layers: tuple[int, ...]) -> None:
        """Recorded steps that give the hidden states of these layers, which are otherwise recorded when they come."""
        if self._graphs is not None:
            with self._on_device():
                self._graphs.capture_all(layers)

    def forward_with_hidden(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """As forward, also with the head's inputs, [logits wanted, width], from which distillation learns."""
        step = self._lay_out(rows)
        out = self.run(step)
        self._advance(rows)
        return out

    def run(self, step: Step) -> tuple[Tensor, Tensor]:
        """Runs a step that is laid out already → logits and the head's inputs."""
        with self._on_device():
            self._prepare_cache(step)
            return self._run(step)

    def _lay_out(self, rows: Sequence[Row]) -> Step:
        self.kv.allocate(rows)
        step = Step(wiped=self.kv.take_unclean(), moves=self.kv.take_moves())
        for row in rows:
            step.add(row, self.info.block_size)
        return step

    def _prepare_cache(self, step: Step) -> None:
        if step.moves:
            self._attention.move(step.moves, self._cache)
        self._cache.wipe(step.wiped, self.info.block_size)

    def _run_tapped(self, step: Step, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if not layers:
            logits, _ = self._run(step)
            return logits, logits[:0]
        taps = Taps(layers, torch.tensor(step.tapped, dtype=torch.int64, device=self._device))
        logits, _ = self._run(step, taps)
        return logits, taps.joined()

    def _run(self, step: Step, taps: Taps | None = None) -> tuple[Tensor, Tensor]:
        batch = self._attention.prepare(step.rows, self._cache)
        if self._adapted is not None:
            have = max(step.adapters) >= 0
            of_tokens = torch.tensor(step.adapters, dtype=torch.int64, device=self._device) if have else None
            self._adapted.of_tokens = of_tokens
        ids, at, wanted = (
            torch.tensor(x, dtype=torch.int64, device=self._device)
            for x in (step.token_ids, step.positions, step.wanted)
        )
        return self._decoder.forward(ids, at, wanted, batch, taps)

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes our GPU the thread's current device, on which kernels are launched; the default is the first GPU."""
        return self._on_gpu() if self._device.type == "cuda" else nullcontext()

    @contextmanager
    def _on_gpu(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            try:
                yield
            except Exception:
                # A CUDA context that has failed once fails every call from then on.
                self._synchronize()
                raise

    def _synchronize(self) -> None:
        """Raises DeviceLost."""
        try:
            torch.cuda.synchronize(self._device)
        except Exception as error:
            raise DeviceLost(f"{self._device}: {error}") from error

    @staticmethod
    def _advance(rows: Sequence[Row]) -> None:
        for row in rows:
            row.sequence.tokens.extend(row.token_ids[: row.num_chain_tokens])
            row.sequence.row = row if row.parents else None


def revision(path: Path, info: ModelInfo, quantization: str = "none") -> str:
    """WEIGHTS/ARITHMETIC, as WorkerInfo.model_revision says."""
    return f"{weights_revision(path, quantization)}/{arithmetic(info)}"


def arithmetic(info: ModelInfo) -> str:
    """dtype, the execution, and all that decides its rounding: CPU instructions, or the GPU."""
    parts = [info.dtype, info.execution]
    if torch.device(info.device).type == "cuda":
        parts.append(torch.cuda.get_device_name(torch.device(info.device)).replace(" ", "-"))
    elif not info.execution.startswith("native"):
        # The execution of our kernels names their instructions; torch uses those that the CPU has.
        parts.append(f"torch-{torch.backends.cpu.get_cpu_capability().lower()}")
    return "-".join(parts)
