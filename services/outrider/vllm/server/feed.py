"""Feeds a scheduler's book in `vllm serve`: opens its requests at the sources of drafts, offers what these propose, and
tells them of commits and ends. Runs on the thread that schedules, and waits only while a step runs.

Faults are raised: the scheduler then decodes the open requests plainly, and they are closed here by `follow`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import Any

from outrider.drafting.source import CloseReason
from outrider.errors import InvalidRequest
from outrider.limits import check_label
from outrider.metadata.tenants.tenants import DEFAULT_TENANT
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.protocol.sequences import opening_for_draft
from outrider.rpc.v1 import sequence_pb2
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import PLAIN, Speculation
from outrider.target.drafts.calibration import Fit
from outrider.target.drafts.drafts import Drafts
from outrider.target.drafts.sequence import SequenceDrafts
from outrider.target.requests.events import Adjusted, Offered
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Timer, Times
from outrider.vllm.drafts import NOTHING, ChainRow, DraftBook
from outrider.vllm.scheduler import StepFacts
from outrider.vllm.server.plugin_config import MAX_DRAFT_TOKENS, TENANT, PluginConfig
from outrider.vllm.server.pool_thread import PoolThread
from outrider.vllm.server.server_drafts import Followed
from outrider.vllm.target.sequence import FINISHES
from outrider.worker.events import Opened

_NO_STEP = StepFacts({}, {}, 0.0)
_REQUEST_ID = re.compile(r"(?:\d+_)?(?:chatcmpl-(.*)|cmpl-(.*)-\d+|(.*))-[0-9a-f]{8}")
"""Of one choice of one prompt: the numbers of both, and a random end that vLLM appends."""


@dataclass(slots=True)
class _Fed:
    """One request that may have drafts."""

    key: SequenceKey
    request: Any
    drafts: SequenceDrafts
    sent_len: int
    """Tokens that the sources know, the prompt included."""
    timer: Timer = field(default_factory=lambda: Timer(time.monotonic()))


class Feed:
    def __init__(
        self,
        book: DraftBook,
        config: PluginConfig,
        max_draft_tokens: int,
        pool: PoolThread | None,
        lookups: Drafts,
        *,
        drafts_itself: bool = False,
    ) -> None:
        """`max_draft_tokens`: what vLLM verifies in one step at most. `drafts_itself`: whether vLLM has a drafter."""
        self._book = book
        self._config = config
        self._max_draft_tokens = max_draft_tokens
        self._pool = pool
        self._lookups = lookups
        self._drafts_itself = drafts_itself
        # Random start: ids must not repeat after a restart, while a router still knows those of the process before.
        self._ids = count(secrets.randbits(62) + 1)
        self.followed: set[str] = set()
        """Requests whose commits somebody follows: a lookup, a draft worker, a router. Others cost a step nothing."""
        self._open: dict[str, _Fed] = {}
        self._by_key: dict[SequenceKey, _Fed] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Any) -> None:
        """From now on the request has drafts, if its tenant may have any, and a router is told of it."""
        tenant = tenant_of(request)
        limit = max(0, min(self._config.cap_of(tenant), _asked(request), self._max_draft_tokens))
        text, tokens_alone = _is_text(request), _has_tokens_alone(request)
        routed = bool(self._config.routers) and tokens_alone
        own = limit if text or (self._drafts_itself and tokens_alone) else 0
        if request.request_id in self._open or not (own or routed):
            return
        speculation = Speculation(limit if text else 0, max_own_draft_tokens=own)
        # First what may fail.
        key, spec = SequenceKey(0, next(self._ids)), spec_of(request, speculation, tenant)
        opened = Opened(key, spec, 0.0, request._all_token_ids)
        announced = announcement_of(key, spec, request) if routed else None
        if routed or self._config.lookups:
            self.followed.add(request.request_id)
        # With a router a request has no drafts before the router allows some, or the pool finds no router.
        drafts = self._lookups.open(key, spec, opened.tokens)
        if routed:
            drafts.adjust(PLAIN, PLAIN)
        fed = self._open[request.request_id] = self._by_key[key] = _Fed(key, request, drafts, request.num_tokens)
        self._book.open(request.request_id, fed.drafts)
        if self._pool is not None:
            self._pool.tell(lambda drafts: drafts.open(opened, announced))

    def before_step(self, until_s: float = 0.0) -> None:
        """Offers what has arrived, and applies the settings of a router. Until `until_s` it waits for drafts that are
        owed: the device is busy, and what comes now is verified a step earlier."""
        if self._pool is not None:
            self._take(self._pool)
            if until_s > time.monotonic():
                self._wait(self._pool, until_s)
        self._lookups.poll()

    def _take(self, pool: PoolThread) -> set[SequenceKey]:
        """Returns the keys of what has arrived."""
        found = set()
        for event in pool.poll():
            if (fed := self._by_key.get(event.key)) is None:
                continue
            found.add(event.key)
            if isinstance(event, Offered):
                fed.drafts.offer(event.tree)
            elif isinstance(event, Adjusted):
                self._lookups.limit(event.key, event.speculation)
            elif isinstance(event, Followed):
                self.followed.add(fed.request.request_id)
        return found

    def _wait(self, pool: PoolThread, until_s: float) -> None:
        price = self._book.row_price
        # In a large batch no token may be worth its row.
        drafts = {key: fed.drafts for key, fed in self._by_key.items()}
        owed = {key for key, each in drafts.items() if each.owed and each.speculation.weight >= price}
        while owed and (left_s := until_s - time.monotonic()) > 0 and pool.wait(left_s):
            owed -= {key for key in self._take(pool) if not drafts[key].owed}

    def follow(
        self,
        step: StepFacts = _NO_STEP,
        verified: Mapping[str, ChainRow] = MappingProxyType({}),
        cached: Mapping[str, int] = MappingProxyType({}),
        names: Iterable[str] | None = None,
    ) -> None:
        """Tells the sources what the last step committed, and which requests have ended. `verified`: by request of
        which it verified drafts; `cached`: by request whose prompt ended in it, tokens from the prefix cache; `names`:
        the requests of which there is something to tell. Without it any may have."""
        routed, pool = bool(self._config.routers), self._pool
        report = self._timed(step, verified) if routed else TargetReport(row_price=self._book.row_price)
        commits: list[tuple[Any, ...]] = []
        ended: list[SequenceKey] = []
        for request_id in list(self._open if names is None else names):
            if (fed := self._open.get(request_id)) is None:
                continue
            finish: Finish | None = Finish.NONE
            if fed.request.is_finished():
                finish = FINISHES.get(fed.request.get_finished_reason())
            base_len = fed.sent_len
            if fresh := fed.drafts.tokens[base_len:]:
                fed.sent_len += len(fresh)
                self._lookups.follow(fed.key, base_len, fresh)
                if pool is not None:
                    seen, times = verified.get(request_id, NOTHING), fed.timer.take() if routed else None
                    commits.append((fed.key, base_len, fresh, finish, seen, times, cached.get(request_id, 0)))
            if finish is not Finish.NONE or request_id not in self._book:
                self._forget(request_id, fed)
                if not (finish and fresh):
                    ended.append(fed.key)
        if pool is not None and commits:
            pool.tell(lambda drafts: drafts.step(_filled(report, commits)))
        for key in ended if pool is not None else ():
            pool.tell(lambda drafts, key=key: drafts.close(key, CloseReason.CANCELLED))  # type: ignore

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()

    def _timed(self, step: StepFacts, verified: Mapping[str, ChainRow]) -> TargetReport:
        """Divides a step's time among its requests: bills and plan need it."""
        report = TargetReport(row_price=self._book.row_price)
        report.step_us, report.batch_sequences = round(step.seconds * 1e6), len(step.counts)
        report.batch_tokens, report.best_chance = step.num_tokens, self._book.calibration.best(Fit())
        ended_s, rows = time.monotonic(), step.num_rows
        shares = self._book.cost.shares(
            sequences=len(step.counts), rows=rows, prompt_tokens=step.num_tokens - rows, seconds=step.seconds
        )
        for request_id, num_tokens in step.counts.items():
            if (fed := self._open.get(request_id)) is None:
                continue
            timer, decodes = fed.timer, step.decodes(request_id)
            timer.step_began(ended_s - step.seconds)
            timer.step_ended(ended_s - step.seconds, ended_s, decides=request_id in verified)
            timer.times.share_s += shares.of(
                prompt_tokens=0 if decodes else num_tokens, rows=num_tokens if decodes else 0
            )
            found = verified.get(request_id, NOTHING)
            timer.times.drafted_s += found.num_drafted * shares.row_s
            timer.times.wasted_s += (found.num_drafted - found.num_accepted) * shares.row_s
        return report

    def _forget(self, request_id: str, fed: _Fed) -> None:
        del self._open[request_id], self._by_key[fed.key]
        self.followed.discard(request_id)
        self._book.close(request_id)
        self._lookups.close(fed.key)


def _filled(report: TargetReport, commits: Iterable[tuple[Any, ...]]) -> TargetReport:
    """With these commits: outside of the thread that schedules."""
    for key, base_len, fresh, finish, verified, times, num_cached in commits:
        row = StepRow(sequence=None, key=key, base_len=base_len, times=times or Times(), num_cached_tokens=num_cached)
        verified.fill(row, fresh, finish or Finish.NONE)
        row.count_sources(row.verified)
        report.commits.append(row)
    return report


def tenant_of(request: Any) -> str:
    found = extra_args(request.sampling_params).get(TENANT, "")
    return found if isinstance(found, str) else ""


def _asked(request: Any) -> int:
    """The cap that the client asks for; without one, more than any other cap."""
    found = extra_args(request.sampling_params).get(MAX_DRAFT_TOKENS)
    return found if isinstance(found, int) else 1 << 30


def _is_text(request: Any) -> bool:
    """Whether a draft worker can know all that its next token follows from."""
    return _has_tokens_alone(request) and not request.mm_features


def _has_tokens_alone(request: Any) -> bool:
    """Whether its tokens are all that a router needs to know of it."""
    return bool(request.prompt_token_ids and request.sampling_params) and not request.resumable


def spec_of(request: Any, speculation: Speculation, tenant: str) -> SequenceSpec:
    """What draft workers are told: the likeliest tokens are drafted, because vLLM's noise is not theirs."""
    return SequenceSpec(
        prompt=tuple(request.prompt_token_ids),
        params=SamplingParams(temperature=0.0),
        mode=VerificationMode.GREEDY,
        max_new_tokens=request.max_tokens,
        stop_token_ids=frozenset(request.sampling_params.all_stop_token_ids),
        speculation=speculation,
        salt=hashlib.sha256(f"{tenant}\0{request.cache_salt or ''}".encode(errors="backslashreplace")).digest()[:16],
        request_id=_label(client_id(request.request_id)),
        tenant=_label(tenant) or DEFAULT_TENANT,
    )


def client_id(request_id: str) -> str:
    """What is particular in the id that the client has got."""
    found = _REQUEST_ID.fullmatch(request_id)
    return found[found.lastindex] if found is not None and found.lastindex else request_id


def announcement_of(key: SequenceKey, spec: SequenceSpec, request: Any) -> sequence_pb2.OpenSequence:
    """What a router is told."""
    message = opening_for_draft(spec, key.sequence_id, spec.committed, spec.speculation.for_draft(0.0))
    if (params := request.sampling_params).temperature:
        seeded = params.seed is not None
        message.mode = sequence_pb2.VERIFICATION_MODE_COUPLED if seeded else sequence_pb2.VERIFICATION_MODE_RATIO
        message.sampling.temperature = params.temperature
    return message


def extra_args(params: Any) -> Mapping[str, Any]:
    """A request's own arguments, of its client or of the middleware."""
    found = None if params is None else params.extra_args
    return found if isinstance(found, Mapping) else {}


def _label(value: str) -> str:
    """For log lines of the draft worker, which refuses what could be mistaken there."""
    try:
        check_label("label", value)
    except InvalidRequest:
        return ""
    return value
