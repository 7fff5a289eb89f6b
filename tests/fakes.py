"""Fake workers: real gRPC servers that speak the protocol, with a text that is a function of the prefix.

A `FakeTarget` answers as a target whose model is `next_token`, and talks to its drafts as a real one does, with
the same code; a `FakeDraft` guesses that function with a given accuracy. Both can be made to break, freeze or lie,
so that what depends on them can be tested in milliseconds and without weights. What a router tells them they do not
check: that is the real workers' business.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from outrider.drafting.pool import DraftLeases, no_leases
from outrider.errors import Code
from outrider.limits import to_us
from outrider.protocol.identity import SPOKEN
from outrider.protocol.tokenizers import chunks_of
from outrider.rpc.access.certificates import TlsFiles
from outrider.rpc.access.credentials import cluster_port
from outrider.rpc.access.roles import RoleGuard
from outrider.rpc.channel import Connect, create_channel
from outrider.rpc.server import ServerLife, create_server, serving
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sequence.key import Finish
from outrider.speculation import Q_TOTAL
from outrider.target.drafts.pool import PoolDrafts
from outrider.target.requests.events import Event, Offered
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Timer
from outrider.target.requests.wire import events_of
from outrider.tree import DraftTree
from outrider.worker.events import Opened, SequenceKey

TARGET_SERVICE = "outrider.rpc.v1.TargetService"
DRAFT_SERVICE = "outrider.rpc.v1.DraftService"

_CONTEXT_TOKENS = 16


def next_token(prefix: Sequence[int], vocab_size: int) -> int:
    """What the simulated model says after `prefix`. Never 0, which tests may use as a stop token."""
    tail = array("I", prefix[-_CONTEXT_TOKENS:]).tobytes()
    digest = hashlib.blake2b(tail, digest_size=8, salt=len(prefix).to_bytes(8, "little")).digest()
    return 1 + int.from_bytes(digest, "little") % (vocab_size - 1)


def continuation(prefix: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The next `count` tokens: what every correct answer to `prefix` starts with."""
    tokens = list(prefix)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prefix) :]


def fake_info(role: worker.WorkerRole.ValueType, **overrides: Any) -> worker.WorkerInfo:
    """Who a fake worker says it is; any field can be overridden."""
    kind = {worker.WORKER_ROLE_DRAFT: "draft", worker.WORKER_ROLE_TARGET: "target"}.get(role, "worker")
    fields: dict[str, Any] = {
        "protocol_version": SPOKEN.newest,
        "role": role,
        "worker_id": f"{kind}-{secrets.token_hex(4)}",
        "model": "simulated" if kind == "target" else "simulated-draft",
        "model_revision": "1",
        "tokenizer_fingerprint": "f" * 16,
        "vocab_size": 1000,
        "draft_kind": "model" if kind == "draft" else "",
        "max_context_len": 4096,
        "max_draft_tokens": 8,
        "max_sequences": 256,
        "block_size": 16,
        "num_blocks": 1024,
        "device": "none",
        "dtype": "none",
    }
    return worker.WorkerInfo(**{**fields, **overrides})


@dataclass(slots=True)
class _Sequence:
    opening: sequence.OpenSequence
    tokens: list[int]
    speculation: sequence.Speculation
    timer: Timer
    draft: list[int] = field(default_factory=list)
    num_dropped: int = 0
    epoch: int = 0
    serial: int = 0
    draft_active: bool = False

    @classmethod
    def of(cls, opening: sequence.OpenSequence) -> _Sequence:
        tokens = [*opening.prompt_token_ids, *opening.committed_token_ids]
        return cls(opening, tokens, opening.speculation, Timer(asyncio.get_running_loop().time()))

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.opening.prompt_token_ids)

    def adjust(self, speculation: sequence.Speculation) -> None:
        self.speculation = speculation
        self.draft_active &= speculation.max_draft_tokens > 0

    def offer(self, draft: DraftTree) -> None:
        """Keeps what continues the truth; drops and counts the rest."""
        self.draft_active |= self.speculation.max_draft_tokens > 0
        known = [*self.tokens[draft.base_len :], *self.draft]
        overlap = len(self.tokens) + len(self.draft) - draft.base_len
        tokens = list(draft.token_ids)
        if overlap < 0 or tokens[:overlap] != known[: len(tokens)] or not self.speculation.max_draft_tokens:
            self.num_dropped += len(tokens)
            return
        if tokens[overlap:]:
            self.serial = draft.serial
        self.timer.draft_answered(asyncio.get_running_loop().time())
        self.draft.extend(tokens[overlap:])


class _Stream:
    """The answering side of one stream. gRPC takes one operation at a time on it, an abort included."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._turn = asyncio.Lock()

    async def write(self, message: Any) -> None:
        async with self._turn:
            await self._context.write(message)

    async def abort(self) -> None:
        async with self._turn:
            await self._context.abort(grpc.StatusCode.INTERNAL, "the worker broke")


class _Worker:
    """What both kinds have in common: identity, records of what was asked, and ways to misbehave."""

    def __init__(self, info: worker.WorkerInfo) -> None:
        self.info = info
        self.load = worker.WorkerLoad()
        self.opens: list[sequence.OpenSequence] = []
        self.closes: list[sequence.CloseSequence] = []
        self.settings: list[sequence.SetSpeculation] = []
        self.num_messages = 0
        self.live: dict[int, Any] = {}
        """Sequences open now."""
        self.life: ServerLife | None = None
        self.refuse_opens: Code | None = None
        """Answers every opening with a SequenceError of this code."""
        self._running = asyncio.Event()
        self._running.set()
        self._broken = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        assert self.life is not None
        return self.life.address

    async def freeze(self) -> None:
        """Stops working while its streams stay open, and answers no call."""
        self._running.clear()

    def break_streams(self) -> None:
        """Ends every stream with an error; new streams are served."""
        self._broken.set()
        self._broken = asyncio.Event()

    async def kill(self) -> None:
        """Gone at once: streams break, the port is closed."""
        assert self._server is not None
        await self._server.stop(0)

    async def _until_broken(self, stream: _Stream, *work: Coroutine[Any, Any, None]) -> None:
        """Runs one stream's tasks until the client leaves or `break_streams` ends it."""
        broken = asyncio.create_task(self._broken.wait())
        tasks = [broken, *map(asyncio.create_task, work)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                await stream.abort()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _refusal(self, opening: sequence.OpenSequence) -> sequence.SequenceError | None:
        if self.refuse_opens is None:
            return None
        code = self.refuse_opens
        return sequence.SequenceError(
            sequence_id=opening.sequence_id, code=code, reason="SIMULATED", field="x", message="refused"
        )


class _AnyDraft(DraftLeases):
    """Whoever a router names is called: no lease is asked for."""

    def hold(self, worker_id: str, address: str) -> bool:
        return True


@dataclass(slots=True)
class _RouterStream:
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    pending: target_pb2.VerifyResponse = field(default_factory=target_pb2.VerifyResponse)


class FakeTarget(_Worker, target_pb2_grpc.TargetServiceServicer):
    """A target that takes `step_s` per step, however many sequences are in it."""

    def __init__(self, *, step_s: float = 0.002, **info: Any) -> None:
        super().__init__(fake_info(worker.WORKER_ROLE_TARGET, **info))
        self.step_s = step_s
        self.corrupt: Callable[[target_pb2.VerifyResponse], target_pb2.VerifyResponse] | None = None
        """Applied to every response, to tell lies."""
        self.garble: Callable[[bytes], bytes] = lambda data: data
        """Applied to every response's bytes, to send what is no response."""
        self.heeds_closes = True
        """False: goes on with sequences it was told to close, as one that is late with everything would."""
        self.connect: Connect = create_channel
        """To drafts."""
        self.tokenizer = b""
        self.num_steps = 0
        self.num_accepted = 0
        self._numbers = itertools.count(1)
        self._streams: dict[int, _RouterStream] = {}
        self._drafts: PoolDrafts | None = None

    @property
    def drafts(self) -> PoolDrafts:
        """Made in the event loop."""
        if self._drafts is None:
            clock = asyncio.get_running_loop().time
            leases, connect = _AnyDraft(no_leases, clock), lambda address: self.connect(address)
            self._drafts = PoolDrafts(self.limits, clock, self._offer, self._tell, leases, connect)
        return self._drafts

    @property
    def limits(self) -> Limits:
        info = self.info
        return Limits(info.vocab_size, info.max_context_len, info.block_size, info.num_blocks)

    async def stop(self) -> None:
        """Lets go of its drafts."""
        if self._drafts is not None:
            await self._drafts.links.stop()

    async def GetInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetInfoResponse:
        await self._running.wait()
        return target_pb2.TargetServiceGetInfoResponse(info=self.info, load=self.load)

    async def EraseHistory(self, request: Any, context: Any) -> target_pb2.EraseHistoryResponse:
        return target_pb2.EraseHistoryResponse()

    async def GetTokenizer(
        self, request: Any, context: Any
    ) -> AsyncIterator[target_pb2.TargetServiceGetTokenizerResponse]:
        for chunk in chunks_of(self.tokenizer):
            yield target_pb2.TargetServiceGetTokenizerResponse(chunk=chunk)

    async def Verify(self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Any) -> None:  # type: ignore[override]
        stream, number = _Stream(context), next(self._numbers)
        mine = self._streams[number] = _RouterStream()

        async def read() -> None:
            async for request in requests:
                self.num_messages += 1
                self._apply(request, mine)
                events = list(events_of(request, number, self.limits, 0.0))
                for event in events:
                    if isinstance(event, Opened) and (state := mine.sequences.get(event.key.sequence_id)):
                        state.tokens = event.tokens
                self.drafts.apply(number, request, events)

        async def step() -> None:
            while True:
                await asyncio.sleep(self.step_s)
                await self._running.wait()
                self._step(number, mine)
                if (pending := mine.pending).commits or pending.errors or pending.draft_errors:
                    message = target_pb2.VerifyResponse()
                    message.CopyFrom(pending)
                    pending.Clear()
                    await stream.write(self.corrupt(message) if self.corrupt else message)

        try:
            await self._until_broken(stream, read(), step())
        finally:
            del self._streams[number]
            self.drafts.stream_ended(number)
            for sequence_id in mine.sequences:
                self.live.pop(sequence_id, None)

    def _offer(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(event, Offered) or (stream := self._streams.get(event.key.stream)) is None:
                continue
            if state := stream.sequences.get(event.key.sequence_id):
                state.offer(event.tree)

    def _tell(self, number: int, response: target_pb2.VerifyResponse) -> None:
        if stream := self._streams.get(number):
            stream.pending.MergeFrom(response)

    def _apply(self, request: target_pb2.VerifyRequest, stream: _RouterStream) -> None:
        mine = stream.sequences
        for opening in request.opens:
            self.opens.append(opening)
            if refusal := self._refusal(opening):
                stream.pending.errors.append(refusal)
                continue
            mine[opening.sequence_id] = self.live[opening.sequence_id] = _Sequence.of(opening)
        for setting in request.settings:
            self.settings.append(setting)
            if setting.sequence_id in mine:
                mine[setting.sequence_id].adjust(setting.speculation)
        for close in request.closes:
            self.closes.append(close)
            if not self.heeds_closes:
                continue
            mine.pop(close.sequence_id, None)
            self.live.pop(close.sequence_id, None)

    def _step(self, number: int, stream: _RouterStream) -> None:
        now_s, mine = asyncio.get_running_loop().time(), stream.sequences
        commits: list[sequence.Commit] = []
        serials: list[int] = []
        for sequence_id, state in list(mine.items()):
            timer, speculation = state.timer, state.speculation
            until_s = timer.ready_since_s + speculation.max_wait_us / 1e6
            if state.draft_active and speculation.max_draft_tokens and not state.draft and now_s < until_s:
                timer.held_until_s = until_s
                continue
            began_s = max(timer.ready_since_s, now_s - self.step_s)
            timer.step_began(began_s)
            timer.step_ended(began_s, now_s, decides=True)
            commit, times = self._verify(sequence_id, state), timer.take()
            commit.queue_us, commit.wait_us = to_us(times.queue_s), to_us(times.wait_s)
            commits.append(commit)
            serials.append(state.serial if commit.num_drafted else 0)
            if commit.finish_reason:
                del mine[sequence_id]
                self.live.pop(sequence_id, None)
        if commits:
            self.num_steps += 1
            stream.pending.step_us = round(self.step_s * 1e6)
            rows = [_committed(number, *one) for one in zip(commits, serials, strict=True)]
            self.drafts.take_report(TargetReport(commits=rows))
            for commit, row in zip(commits, rows, strict=True):
                if row.draft_stats is not None:
                    commit.draft_stats.CopyFrom(row.draft_stats)
            stream.pending.commits.extend(commits)

    def _verify(self, sequence_id: int, state: _Sequence) -> sequence.Commit:
        """Judges the buffered draft by the true continuation: accepted tokens and one of the target's own."""
        stopping, base_len = state.opening.stopping, len(state.tokens)
        draft = state.draft[: state.speculation.max_draft_tokens]
        accepted = 0
        emitted: list[int] = []
        finish = sequence.FINISH_REASON_UNSPECIFIED
        while not finish:
            token = next_token(state.tokens, self.info.vocab_size)
            guessed = accepted < len(draft) and draft[accepted] == token
            state.tokens.append(token)
            emitted.append(token)
            accepted += guessed
            if token in stopping.stop_token_ids:
                finish = sequence.FINISH_REASON_STOP
            elif state.num_output >= stopping.max_new_tokens or len(state.tokens) >= self.info.max_context_len:
                finish = sequence.FINISH_REASON_LENGTH
            if not guessed:
                break
        self.num_accepted += accepted
        dropped = state.num_dropped + max(0, len(state.draft) - len(draft))
        state.draft, state.num_dropped = [], 0
        return sequence.Commit(
            sequence_id=sequence_id,
            base_len=base_len,
            token_ids=emitted,
            num_drafted=len(draft),
            num_verified=min(len(draft), accepted + (len(emitted) > accepted)),
            num_accepted=accepted,
            finish_reason=finish,
            num_dropped=dropped,
            rejected_token_ids=draft[accepted:],
        )


def _committed(number: int, commit: sequence.Commit, serial: int) -> StepRow[None]:
    """As the drafts' side hears of it."""
    drafted = [*commit.token_ids[: commit.num_accepted], *commit.rejected_token_ids]
    return StepRow(
        sequence=None,
        key=SequenceKey(number, commit.sequence_id),
        base_len=commit.base_len,
        draft=DraftTree(commit.base_len, tuple(drafted), serial=serial),
        token_ids=list(commit.token_ids),
        accepted=range(commit.num_accepted),
        num_verified=commit.num_verified,
        finish=Finish(commit.finish_reason),
        num_dropped=commit.num_dropped,
    )


class FakeDraft(_Worker, draft_pb2_grpc.DraftServiceServicer):
    """A draft that guesses each token right with probability `accuracy`, `delay_s` after the commit."""

    def __init__(self, *, accuracy: float = 0.8, delay_s: float = 0.0, **info: Any) -> None:
        super().__init__(fake_info(worker.WORKER_ROLE_DRAFT, **info))
        self.accuracy = accuracy
        self.delay_s = delay_s
        self.corrupt: Callable[[draft_pb2.DraftResponse], draft_pb2.DraftResponse] | None = None
        self.num_commits = 0
        self.behind: Counter[str] = Counter()
        """Commits that did not continue what this draft knew: a target must never send one."""

    async def GetInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetInfoResponse:
        await self._running.wait()
        return draft_pb2.DraftServiceGetInfoResponse(info=self.info, load=self.load)

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # type: ignore[override]
        stream = _Stream(context)
        mine: dict[int, _Sequence] = {}
        pending = draft_pb2.DraftResponse()
        filled = asyncio.Event()

        async def read() -> None:
            async for request in requests:
                self.num_messages += 1
                self._apply(request, mine, pending)
                filled.set()

        async def propose() -> None:
            while True:
                await filled.wait()
                filled.clear()
                await asyncio.sleep(self.delay_s)
                await self._running.wait()
                message = draft_pb2.DraftResponse()
                message.CopyFrom(pending)
                pending.Clear()
                if message.drafts or message.errors:
                    await stream.write(self.corrupt(message) if self.corrupt else message)

        try:
            await self._until_broken(stream, read(), propose())
        finally:
            for sequence_id in mine:
                self.live.pop(sequence_id, None)

    def _apply(
        self, request: draft_pb2.DraftRequest, mine: dict[int, _Sequence], pending: draft_pb2.DraftResponse
    ) -> None:
        fresh: dict[int, _Sequence] = {}
        for opening in request.opens:
            self.opens.append(opening)
            if refusal := self._refusal(opening):
                pending.errors.append(refusal)
                continue
            fresh[opening.sequence_id] = mine[opening.sequence_id] = _Sequence.of(opening)
            self.live[opening.sequence_id] = mine[opening.sequence_id]
        for commit in request.commits:
            self.num_commits += 1
            state = mine.get(commit.sequence_id)
            if state is None or commit.base_len != len(state.tokens):
                self.behind["unknown" if state is None else "gap"] += 1
                continue
            state.tokens.extend(commit.token_ids)
            fresh[commit.sequence_id] = state
        for setting in request.settings:
            self.settings.append(setting)
            if setting.sequence_id in mine:
                mine[setting.sequence_id].speculation = setting.speculation
        for close in request.closes:
            self.closes.append(close)
            for sequences in (mine, self.live, fresh):
                sequences.pop(close.sequence_id, None)
        pending.drafts.extend(self._guess(sequence_id, state) for sequence_id, state in fresh.items())

    def _guess(self, sequence_id: int, state: _Sequence) -> sequence.Draft:
        tokens = list(state.tokens)
        for _ in range(state.speculation.max_draft_tokens):
            token = next_token(tokens, self.info.vocab_size)
            chance = next_token([*tokens, 1], 10_001) / 10_000
            tokens.append(token if chance <= self.accuracy else 1 + token % (self.info.vocab_size - 1))
        draft = sequence.Draft(
            sequence_id=sequence_id,
            epoch=state.epoch,
            base_len=len(state.tokens),
            token_ids=tokens[len(state.tokens) :],
            source="simulated",
            draft_us=round(self.delay_s * 1e6) + 1,
            compute_us=round(self.delay_s * 1e6),
        )
        if state.opening.mode == sequence.VERIFICATION_MODE_RATIO:
            draft.sampling.CopyFrom(state.opening.sampling)
            for token in draft.token_ids:
                draft.q.add(token_ids=[token], counts=[Q_TOTAL])
        return draft


@asynccontextmanager
async def serving_target(
    target: FakeTarget, address: str = "127.0.0.1:0", tls: TlsFiles | None = None
) -> AsyncIterator[FakeTarget]:
    """Serves until the block is left."""
    server = create_server(guard=RoleGuard(certificates=tls is not None))
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    verify: Any = grpc.stream_stream_rpc_method_handler(
        target.Verify,
        request_deserializer=target_pb2.VerifyRequest.FromString,
        response_serializer=lambda message: target.garble(message.SerializeToString()),
    )
    server.add_registered_method_handlers(TARGET_SERVICE, {"Verify": verify})
    async with _serving(target, server, address, TARGET_SERVICE, tls):
        try:
            yield target
        finally:
            await target.stop()


@asynccontextmanager
async def serving_draft(draft: FakeDraft, address: str = "127.0.0.1:0") -> AsyncIterator[FakeDraft]:
    """Serves until the block is left."""
    server = create_server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    async with _serving(draft, server, address, DRAFT_SERVICE):
        yield draft


@asynccontextmanager
async def _serving(
    simulated: _Worker, server: grpc.aio.Server, address: str, service: str, tls: TlsFiles | None = None
) -> AsyncIterator[None]:
    async with serving(server, address, services=[service], grace_s=0, credentials=cluster_port(tls)) as life:
        simulated.life, simulated._server = life, server
        await life.ready()
        yield
