"""Records samples of a target's sequences. A thread writes them, so that no step waits for the disk."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import socket
import time
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.errors import Unavailable
from outrider.metadata.erasures import Order
from outrider.runtime.supervision import background
from outrider.runtime.turns import settle
from outrider.samples import SampleStore
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SAMPLED_TOP, SampleConsent, SequenceSpec
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow

if TYPE_CHECKING:
    from outrider.metadata.store import MetadataStore

log = logging.getLogger(__name__)
_RETRY_S = 1.0
_START_S = 5.0
"""A target starts without a volume that has not answered by then."""
_CLOSE_S = 2.0
_PAUSE_S = 0.001
_LOOK_EVERY_S = 3600.0
_PART = 64
"""Positions of one part of a record."""
_CHUNK_CHARS = 1 << 15
"""What is encrypted at once."""
_BYTES_PER_TOKEN = 36
"""Of an opening: a number of Python's, and its place in a list."""
_MAX_HELD_BYTES = 64 << 20
_LISTS = ("prompt", "committed", "output", "top_token_ids", "top_logprobs")
_WIDE = _LISTS[3:]
T = TypeVar("T")
Servicer = TypeVar("Servicer", bound=AbstractAsyncContextManager[Any])


@dataclass(slots=True, eq=False)
class _Sample:
    """A sequence under way. A step does work for what it committed; the rest is done by the thread that writes."""

    spec: SequenceSpec
    output: array[int] = field(default_factory=lambda: array("i"))
    top_ids: array[int] = field(default_factory=lambda: array("i"))
    """Next, their log probabilities; `width` of each at every position."""
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))
    width: int = 1
    accepted: Counter[str] = field(default_factory=Counter)
    """By source; next, those verified."""
    verified: Counter[str] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        spec = self.spec
        return _BYTES_PER_TOKEN * spec.num_tokens + 4 * (len(self.output) + len(self.top_ids) + len(self.top_logprobs))

    def add(self, committed: StepRow[Any]) -> None:
        for one in committed.sources:
            self.accepted[one.source] += one.num_accepted
            self.verified[one.source] += one.num_verified
        self.output.extend(committed.token_ids)
        if self.spec.samples is SampleConsent.TEXT:
            for each in committed.top:
                self.width = len(each.top_token_ids[:SAMPLED_TOP])
                self.top_ids.extend(each.top_token_ids[:SAMPLED_TOP])
                self.top_logprobs.extend(each.top_logprobs[:SAMPLED_TOP])

    def concerns(self, tenant: str, ordered_us: int) -> bool:
        """Whether the order is about it; 0: of now."""
        return self.spec.tenant == tenant and (not ordered_us or self.spec.consent_unix_us < ordered_us)

    @property
    def acceptance(self) -> float:
        return self.accepted.total() / max(1, self.verified.total())

    def parts(self, revision: str) -> Iterator[str]:
        """The record as JSON. Each part is little work: the interpreter runs one thread at a time."""
        spec = self.spec
        numbers = {
            "unix_s": round(time.time()),
            "model_revision": revision,
            "temperature": spec.params.temperature,
            "prompt_tokens": len(spec.prompt),
            "output_tokens": len(self.output),
            "accepted": dict(self.accepted),
            "verified": dict(self.verified),
        }
        yield _json(numbers)[:-1]
        if spec.samples is SampleConsent.TEXT:
            # Apart, since what a lost target has committed is of the answer: a prompt is the same in all its records.
            prompt, committed = spec.prompt, spec.committed
            lists: tuple[Sequence[float], ...] = prompt, committed, self.output, self.top_ids, self.top_logprobs
            for name, values in zip(_LISTS, lists, strict=True):
                width = self.width if name in _WIDE else 1
                for start in range(0, max(1, len(values)), _PART * width):
                    part = [round(value, 3) for value in values[start : start + _PART * width]]
                    rows = [part[n : n + width] for n in range(0, len(part), width)] if name in _WIDE else part
                    yield (f',"{name}":[' if not start else ",") + _json(rows)[1:-1]
                yield "]"
        yield "}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def recorder_of(store: SampleStore | None, revision: str) -> SampleRecorder | None:
    """None where no sample is kept."""
    return None if store is None else SampleRecorder(store, revision)


class SampleRecorder:
    """Called by the step thread. What it holds in memory is bounded: where the volume does not keep up, or does not
    answer at all, samples are dropped, and nothing waits."""

    def __init__(self, store: SampleStore, revision: str, max_bytes: int = _MAX_HELD_BYTES) -> None:
        """`revision`: of the model, for the records. `max_bytes`: of the samples in memory."""
        self.store = store
        self.paused = False
        """Nothing is recorded."""
        self.num_dropped = 0
        """Samples, since the start."""
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._revision = revision
        self._samples: dict[SequenceKey, _Sample] = {}
        self._work: deque[_Sample | Callable[[], None]] = deque()
        self._lock = Condition()
        """Of what the two threads share: the work, and the bytes."""
        self._closing = Event()
        self._thread = Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def open(self, key: SequenceKey, spec: SequenceSpec) -> None:
        if spec.samples is not SampleConsent.OFF and not self.paused:
            sample = self._samples[key] = _Sample(spec)
            self._hold(key, sample, sample.num_bytes)

    def note(self, report: TargetReport) -> None:
        """Adds what was committed; records those that have ended and had drafts verified."""
        for committed in report.commits:
            if (sample := self._samples.get(committed.key)) is not None:
                before = sample.num_bytes
                sample.add(committed)
                self._hold(committed.key, sample, sample.num_bytes - before)
        for key, _ in report.removed:
            if (sample := self._samples.pop(key, None)) is not None:
                if sample.verified:
                    self._put(sample)
                else:
                    self._release(sample)

    def erase(self, tenant: str, ordered_us: int, done: Callable[[int, str, bool], None]) -> None:
        """As SampleStore.erase. Nothing of a sequence that it concerns is recorded later, whether it runs now or waits
        to be written. `done` is called with the number of records, the volume, and whether somebody keeps what it has
        read of them; never, while the volume does not answer.
        """
        for key, sample in list(self._samples.items()):
            if sample.concerns(tenant, ordered_us):
                self._release(self._samples.pop(key))
        with self._lock:
            waiting = [one for one in self._work if isinstance(one, _Sample) and one.concerns(tenant, ordered_us)]
            for one in waiting:
                self._work.remove(one)
                self._release(one)
        store = self.store
        # After what is being written now.
        self._put(lambda: done(len(waiting) + store.erase(tenant, ordered_us), store.volume_id(), store.held(tenant)))

    async def on_volume(self, work: Callable[[SampleStore], T]) -> T:
        """What `work` finds, in the thread that may wait for the volume. Raises what it raises."""
        found = Future[T]()
        self._put(partial(settle, found, lambda: work(self.store)))
        return await asyncio.wrap_future(found)

    def close(self) -> None:
        """Gives the volume a moment for what is still to be written, and does not wait for one that does not answer."""
        self._closing.set()
        with self._lock:
            self._lock.notify()
        self._thread.join(_CLOSE_S)

    def _hold(self, key: SequenceKey, sample: _Sample, num_bytes: int) -> None:
        """Counts what the sample has become longer by. Drops it where that is too much."""
        with self._lock:
            self.held_bytes += num_bytes
        if self.held_bytes > self._max_bytes:
            self.num_dropped += 1
            self._release(self._samples.pop(key))

    def _release(self, sample: _Sample) -> None:
        with self._lock:
            self.held_bytes -= sample.num_bytes

    def _put(self, work: _Sample | Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)
            self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._work or self._closing.is_set(), _LOOK_EVERY_S)
                if not self._work and self._closing.is_set():
                    return
                # What is too old goes though nothing is written.
                work = self._work.popleft() if self._work else self.store.prune
            try:
                self._write(work) if isinstance(work, _Sample) else work()
            except Exception as error:
                # Its traceback may have a record.
                log.error("samples could not be written or erased: %s", type(error).__name__)
            finally:
                if isinstance(work, _Sample):
                    self._release(work)
                del work

    def _write(self, sample: _Sample) -> None:
        def paced() -> Iterator[bytes]:
            chunk = ""
            for part in sample.parts(self._revision):
                chunk += part
                if len(chunk) > _CHUNK_CHARS:
                    yield chunk.encode()
                    chunk = ""
                self._closing.wait(_PAUSE_S)
            yield chunk.encode()

        of = sample.spec
        self.store.write_parts(of.tenant, sample.acceptance, paced(), of.consent_unix_us)


@asynccontextmanager
async def obedient(
    servicer: Servicer, samples: SampleRecorder | None, store: MetadataStore | None
) -> AsyncIterator[Servicer]:
    """Within the block the servicer runs. What was ordered to be erased while it was away is erased before. If the
    metadata store or the volume does not answer, nothing is recorded until it does.
    """
    async with servicer, AsyncExitStack() as stack:
        if samples is not None and store is not None:
            samples.paused = True
            tried = asyncio.Event()
            await stack.enter_async_context(background(_obey(samples, store, tried), "erase what was ordered"))
            with suppress(TimeoutError):
                await asyncio.wait_for(tried.wait(), _START_S)
        yield servicer


async def _obey(samples: SampleRecorder, store: MetadataStore, tried: asyncio.Event) -> None:
    while samples.paused:
        samples.paused = not await _obeyed(samples, store)
        tried.set()
        if samples.paused:
            await asyncio.sleep(_RETRY_S)


async def _obeyed(samples: SampleRecorder, store: MetadataStore) -> bool:
    """False while the metadata store does not answer, or the volume fails."""
    try:
        # First: an order that comes meanwhile waits for this volume.
        where = f"{socket.gethostname()}:{samples.store.directory.absolute()}"
        await store.erasures.add_volume(await samples.on_volume(SampleStore.volume_id), where)
        own = await samples.on_volume(SampleStore.orders)
        await store.erasures.known(Order(tenant, True, at_us) for tenant, at_us in own)
        for order in await store.erasures.orders():
            if order.samples:
                await samples.on_volume(partial(SampleStore.erase, tenant=order.tenant, ordered_us=order.at_us))
        return True
    except Unavailable:
        return False
    except OSError as error:
        log.error("samples that were ordered to be erased could not be: %s", error)
        return False
