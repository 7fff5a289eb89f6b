"""Who is up, who has the prefix, who has room: the target pool and the draft pool as this router sees them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.errors import Unavailable
from outrider.metadata import LeaseRecord
from outrider.prefix import block_hashes
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import draft_pb2, target_pb2
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.supervision import Backoff, keep_running

from outrider_controller.router.choice import Candidate, believed_load, only_leaving, rank
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.links import DRAFT_VERBS, TARGET_VERBS, Connect, Listener, Verbs, WorkerLink
from outrider_controller.router.pairing import pairing_problem, same_weights

log = logging.getLogger(__name__)

TargetLink = WorkerLink[target_pb2.VerifyRequest, target_pb2.VerifyResponse]
DraftLink = WorkerLink[draft_pb2.DraftRequest, draft_pb2.DraftResponse]
TargetListener = Listener[target_pb2.VerifyRequest, target_pb2.VerifyResponse]
DraftListener = Listener[draft_pb2.DraftRequest, draft_pb2.DraftResponse]
LinkKey = tuple[str, int]
_NONE: Mapping[str, int] = {}


class Directory(Protocol):
    """The part of the metadata store that the pools read."""

    @property
    def available(self) -> bool: ...

    async def workers(self, role: worker.WorkerRole.ValueType | None = None) -> list[LeaseRecord]: ...

    async def lookup_prefix(self, role: worker.WorkerRole.ValueType, hashes: Sequence[bytes]) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence starts with and under which salt its blocks are shared."""

    token_ids: tuple[int, ...]
    salt: bytes


class Pools:
    """Keeps one link per leased worker and picks among them. `async with` it; links live inside."""

    def __init__(
        self,
        directory: Directory,
        config: RouterConfig,
        targets: TargetListener,
        drafts: DraftListener,
        on_change: Callable[[], None],
        connect: Connect = create_channel,
    ) -> None:
        self._directory = directory
        self._config = config
        self._target_listener = targets
        self._draft_listener = drafts
        self._on_change = on_change
        self._connect = connect
        self._targets: dict[str, TargetLink] = {}
        self._drafts: dict[str, DraftLink] = {}
        self._loads: dict[str, worker.WorkerLoad] = {}
        self._seen: dict[str, worker.WorkerInfo] = {}
        self._warned: set[str] = set()
        self._changed = asyncio.Event()
        self._refreshed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pools:
        self._task = asyncio.create_task(self._refresh_forever(), name="pools refresh")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        links: list[WorkerLink[Any, Any]] = [*self._targets.values(), *self._drafts.values()]
        await asyncio.gather(*(link.stop() for link in links))

    # -- what is there

    def live_targets(self, model: str) -> list[TargetLink]:
        return [t for t in self._targets.values() if t.up and t.info.model == model and self._takes_work(t)]

    def model_info(self, model: str) -> worker.WorkerInfo | None:
        """Of a live target of this name, else of the last one seen; None when there never was one."""
        live = self.live_targets(model)
        return live[0].info if live else self._seen.get(model)

    @property
    def has_seen_targets(self) -> bool:
        """Whether there ever was a target, of whatever model."""
        return bool(self._seen)

    def models(self) -> list[router.ServedModel]:
        """The models that live targets serve."""
        live = [t for t in self._targets.values() if t.up]
        first = {t.info.model: t.info for t in reversed(live)}
        return [
            router.ServedModel(
                model=name,
                max_context_len=info.max_context_len,
                vocab_size=info.vocab_size,
                tokenizer_fingerprint=info.tokenizer_fingerprint,
                num_targets=sum(t.info.model == name for t in live),
                num_drafts=sum(d.up and pairing_problem(info, d.info) is None for d in self._drafts.values()),
            )
            for name, info in sorted(first.items())
        ]

    async def ready(self, timeout_s: float) -> None:
        """Returns once the leases were read for the first time and every worker they name was tried.

        Raises Unavailable when the metadata store did not answer within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._refreshed.wait()
        except TimeoutError:
            raise Unavailable("the metadata store has not answered yet", reason="NO_METADATA") from None

    def changed(self) -> asyncio.Event:
        """Set when a worker comes, goes or gets room. Take it before looking, or a change in between is missed."""
        return self._changed

    def notify(self) -> None:
        done, self._changed = self._changed, asyncio.Event()
        done.set()
        self._on_change()

    # -- choosing

    async def choose_target(
        self, model: str, revision: str | None, prefix: Prefix, avoid: Iterable[LinkKey] = ()
    ) -> TargetLink | None:
        """The best live target of this model with room. `revision` holds a request to what it began on."""
        avoided = set(avoid)
        links = {
            t.worker_id: t
            for t in self.live_targets(model)
            if t.key not in avoided and revision in (None, t.info.model_revision)
        }
        best = await self._best(worker.WORKER_ROLE_TARGET, links, prefix)
        return links[best] if best is not None and links[best].up else None

    def revisions_like(self, model: str, revision: str, avoid: Iterable[LinkKey] = ()) -> list[str]:
        """What a request that began on `revision` may go on with: that, while any target has it; else all revisions of
        the same weights, which compute them otherwise."""
        avoided = set(avoid)
        live = {t.info.model_revision for t in self.live_targets(model) if t.key not in avoided}
        return [revision] if revision in live else sorted(r for r in live if same_weights(r, revision))

    async def choose_draft(
        self,
        target: worker.WorkerInfo,
        prefix: Prefix,
        avoid: Iterable[LinkKey] = (),
        together: Mapping[str, int] = _NONE,
    ) -> DraftLink | None:
        """The best live draft with room that can work with this target; `together`: sequences each drafts for it."""
        avoided = set(avoid)
        links = {
            d.worker_id: d
            for d in self._drafts.values()
            if d.up
            and d.key not in avoided
            and self._takes_work(d)
            and self._pairs(target, d.info)
            and d.info.max_context_len > len(prefix.token_ids)
        }
        best = await self._best(worker.WORKER_ROLE_DRAFT, links, prefix, together)
        return links[best] if best is not None and links[best].up else None

    def has_full_target(self, model: str) -> bool:
        return any(self._candidate(t).full for t in self.live_targets(model))

    def draft_has_room(self) -> bool:
        return any(d.up and self._takes_work(d) and not self._candidate(d).full for d in self._drafts.values())

    async def _best(
        self,
        role: worker.WorkerRole.ValueType,
        links: Mapping[str, WorkerLink[Any, Any]],
        prefix: Prefix,
        together: Mapping[str, int] = _NONE,
    ) -> str | None:
        matched = await self._matches(role, links.values(), prefix) if len(links) > 1 else {}
        candidates = [
            self._candidate(link, matched.get(worker_id, 0), together.get(worker_id, 0))
            for worker_id, link in links.items()
        ]
        # Shuffled first: routers that see the same ties must not all pick the same worker.
        random.shuffle(candidates)
        ranked = rank(candidates)
        return ranked[0].worker_id if ranked else None

    async def _matches(
        self, role: worker.WorkerRole.ValueType, links: Iterable[WorkerLink[Any, Any]], prefix: Prefix
    ) -> dict[str, int]:
        """Matched leading blocks per worker; the block size is part of a block's identity."""
        matched: dict[str, int] = {}
        for block_size in {link.info.block_size for link in links} - {0}:
            hashes = block_hashes(prefix.token_ids, block_size, prefix.salt)
            if hashes:
                matched.update(await self._directory.lookup_prefix(role, hashes))
        return matched

    def _candidate(self, link: WorkerLink[Any, Any], matched_blocks: int = 0, num_together: int = 0) -> Candidate:
        load = self._load(link)
        return Candidate(
            worker_id=link.worker_id,
            matched_blocks=matched_blocks,
            num_sequences=max(load.num_running + load.num_waiting, len(link.open_sequences)),
            max_sequences=link.info.max_sequences,
            num_waiting=load.num_waiting,
            num_together=num_together,
        )

    def _takes_work(self, link: WorkerLink[Any, Any]) -> bool:
        return not self._load(link).draining

    def _load(self, link: WorkerLink[Any, Any]) -> worker.WorkerLoad:
        """Without a lease, which the store may have lost, only what can be told of a worker that was reached once."""
        known = self._loads.get(link.worker_id)
        return only_leaving(link.load) if known is None else known

    def _pairs(self, target: worker.WorkerInfo, draft: worker.WorkerInfo) -> bool:
        problem = pairing_problem(target, draft)
        if problem and problem not in self._warned:
            self._warned.add(problem)
            log.warning("%s", problem)
        return problem is None

    # -- following the leases

    async def _refresh_forever(self) -> None:
        # The last known pools keep serving; what broke must not end the only task that would mend them.
        await keep_running(
            self._refresh_and_rest, Backoff(self._config.refresh_s, self._config.refresh_s), self._failed
        )

    async def _refresh_and_rest(self) -> None:
        await self.refresh()
        await asyncio.sleep(self._config.refresh_s)

    def _failed(self, error: Exception) -> None:
        log.error("reading the leases failed", exc_info=error)

    async def refresh(self) -> None:
        """Connects to newly leased workers and lets go of those whose lease and stream are both gone."""
        records = await self._directory.workers()
        self._loads = {r.info.worker_id: believed_load(r) for r in records}
        for record in records:
            if record.info.role == worker.WORKER_ROLE_TARGET:
                self._seen[record.info.model] = record.info
                self._follow(self._targets, record, TARGET_VERBS, self._target_listener)
            elif record.info.role == worker.WORKER_ROLE_DRAFT:
                self._follow(self._drafts, record, DRAFT_VERBS, self._draft_listener)
        await asyncio.gather(self._let_go(self._targets), self._let_go(self._drafts))
        # An empty list from a store that did not answer is no news.
        if self._directory.available and not self._refreshed.is_set():
            await self._first_connections()
            self._refreshed.set()
        self.notify()

    def _follow(
        self,
        links: dict[str, Any],
        record: LeaseRecord,
        verbs: Verbs[Any, Any],
        listener: Listener[Any, Any],
    ) -> None:
        if record.info.worker_id not in links:
            links[record.info.worker_id] = WorkerLink(
                record.info.worker_id,
                record.address,
                verbs,
                listener,
                self._config.link,
                self._config.failover,
                self._connect,
            )

    async def _let_go(self, links: dict[str, Any]) -> None:
        """A lease may lapse while the worker only lost the metadata store: a stream that stands is proof enough."""
        gone = [worker_id for worker_id, link in links.items() if worker_id not in self._loads and not link.up]
        stopping = [links.pop(worker_id) for worker_id in gone]
        await asyncio.gather(*(link.stop() for link in stopping))

    async def _first_connections(self) -> None:
        """A request that arrives as the router starts should meet all workers, not the fastest."""
        links: list[WorkerLink[Any, Any]] = [*self._targets.values(), *self._drafts.values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.link.connect_timeout_s):
                await asyncio.gather(*(link.tried.wait() for link in links))
