"""Records samples of a target's sequences. A thread writes them, so that no step waits for the disk."""

from __future__ import annotations

import asyncio
import atexit
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.errors import Unavailable
from outrider.metadata.erasures import Order
from outrider.options.logprobs import TokenLogprobs
from outrider.protocol.sequence_key import SequenceKey
from outrider.runtime.supervision import background
from outrider.samples import SampleStore
from outrider.target.requests.opening import Opening, SampleConsent
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow

if TYPE_CHECKING:
    from outrider.metadata.store import MetadataStore

log = logging.getLogger(__name__)
_RETRY_S = 1.0
Servicer = TypeVar("Servicer", bound=AbstractAsyncContextManager[Any])


@dataclass(slots=True)
class _Sample:
    """A sequence under way."""

    opening: Opening
    output: list[int] = field(default_factory=list)
    top: list[TokenLogprobs] = field(default_factory=list)
    accepted: Counter[str] = field(default_factory=Counter)
    """By source; next, those verified."""
    verified: Counter[str] = field(default_factory=Counter)

    def add(self, committed: StepRow[Any]) -> None:
        self.output += committed.token_ids
        self.top += committed.top
        for one in committed.sources:
            self.accepted[one.source] += one.num_accepted
            self.verified[one.source] += one.num_verified

    @property
    def acceptance(self) -> float:
        return self.accepted.total() / max(1, self.verified.total())

    def record(self, revision: str) -> dict[str, Any]:
        opening = self.opening
        found: dict[str, Any] = {
            "unix_s": round(time.time()),
            "model_revision": revision,
            "temperature": opening.params.temperature,
            "prompt_tokens": len(opening.prompt),
            "output_tokens": len(self.output),
            "accepted": dict(self.accepted),
            "verified": dict(self.verified),
        }
        if opening.samples is SampleConsent.TEXT:
            found["prompt"] = [*opening.prompt, *opening.committed]
            found["output"] = self.output
            found["top_token_ids"] = [each.top_token_ids for each in self.top]
            found["top_logprobs"] = [[round(p, 3) for p in each.top_logprobs] for each in self.top]
        return found


def recorder_of(store: SampleStore | None, revision: str) -> SampleRecorder | None:
    """None where no sample is kept."""
    return None if store is None else SampleRecorder(store, revision)


class SampleRecorder:
    """Called by the step thread."""

    def __init__(self, store: SampleStore, revision: str) -> None:
        """`revision`: of the model, for the records."""
        self.store = store
        self.paused = False
        """Nothing is recorded."""
        self._revision = revision
        self._samples: dict[SequenceKey, _Sample] = {}
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._thread = Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def open(self, key: SequenceKey, opening: Opening) -> None:
        if opening.samples is not SampleConsent.OFF and not self.paused:
            self._samples[key] = _Sample(opening)

    def note(self, report: TargetReport) -> None:
        """Adds what was committed; records those that have ended and had drafts verified."""
        for committed in report.commits:
            if (sample := self._samples.get(committed.key)) is not None:
                sample.add(committed)
        for key, _ in report.removed:
            if (sample := self._samples.pop(key, None)) is not None and sample.verified:
                record = sample.record(self._revision)
                of = sample.opening
                self._work.put(partial(self.store.write, of.tenant, sample.acceptance, record, of.consent_us))

    def erase(self, tenant: str, ordered_us: int, done: Callable[[int], None]) -> None:
        """As SampleStore.erase. Nothing of a sequence that it concerns and that runs now is recorded either. `done` is
        called with the number of records.
        """
        for key, sample in list(self._samples.items()):
            if sample.opening.tenant == tenant and (not ordered_us or sample.opening.consent_us < ordered_us):
                del self._samples[key]
        # After all that was put before.
        self._work.put(lambda: done(self.store.erase(tenant, ordered_us)))

    def close(self) -> None:
        """Returns once everything is written."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:
                # Its traceback may have a record.
                log.error("samples could not be written or erased: %s", type(error).__name__)


@asynccontextmanager
async def obedient(
    servicer: Servicer, samples: SampleRecorder | None, store: MetadataStore | None
) -> AsyncIterator[Servicer]:
    """Within the block the servicer runs. What was ordered to be erased while it was away is erased before, and if the
    metadata store does not answer, nothing is recorded until it does.
    """
    async with servicer, AsyncExitStack() as stack:
        if samples is not None and store is not None:
            samples.paused = not await _obeyed(samples.store, store)
            if samples.paused:
                await stack.enter_async_context(background(_obey_later(samples, store), "erase what was ordered"))
        yield servicer


async def _obey_later(samples: SampleRecorder, store: MetadataStore) -> None:
    while samples.paused:
        await asyncio.sleep(_RETRY_S)
        samples.paused = not await _obeyed(samples.store, store)


async def _obeyed(samples: SampleStore, store: MetadataStore) -> bool:
    """False while the metadata store does not answer, or the volume fails."""
    try:
        # First: an order that comes meanwhile waits for this volume.
        where = f"{socket.gethostname()}:{samples.directory.absolute()}"
        await store.erasures.add_volume(await asyncio.to_thread(samples.volume_id), where)
        own = await asyncio.to_thread(samples.orders)
        await store.erasures.known(Order(tenant, True, at_us) for tenant, at_us in own)
        for order in await store.erasures.orders():
            if order.samples:
                await asyncio.to_thread(samples.erase, order.tenant, order.at_us)
        return True
    except Unavailable:
        return False
    except OSError as error:
        log.error("samples that were ordered to be erased could not be: %s", error)
        return False
