"""The load of `python -m benchmarks router`: workers and gateways of a fleet, in one process with one clock.

Runs as a child process on its own core. Reads the load as JSON from stdin, and writes its measurements to stdout.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import psutil
from outrider.metadata import LeaseRecord, MetadataStore
from outrider.rpc.access.roles import Role
from outrider.rpc.channel import connect_to
from outrider.rpc.v1 import router_pb2, router_pb2_grpc, worker_pb2
from outrider.rpc.v1 import sequence_pb2 as sequence

from benchmarks.support.paced import MAX_CONTEXT_LEN, VOCAB_SIZE, Marks, PacedTarget
from tests.fakes import fake_info, serving_target

MODEL = "simulated"
_TIMEOUT_S = 30.0
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """One fleet and its requests."""

    sequences: int
    seconds: float
    """Length of the measured window."""
    steps_per_s: float = 30.0
    accuracy: float = 0.7
    """Share of right tokens in drafts."""
    draft_step_s: float = 0.01
    max_tokens: int = 512
    """Longest answer. A client sends the next request as soon as an answer has ended."""
    prompt_tokens: int = 128
    per_target: int = 64
    per_draft: int = 256
    gateways: int = 2

    @property
    def num_targets(self) -> int:
        return math.ceil(self.sequences / self.per_target)

    @property
    def num_drafts(self) -> int:
        return math.ceil(self.sequences / self.per_draft)


class LoadFailed(Exception):
    """The router answered a call with an error, or did not answer."""


class Client:
    """A gateway, as the router sees it. `numbers`: the sequences that it keeps running."""

    def __init__(self, stub: router_pb2_grpc.RouterServiceAsyncStub, load: Load, marks: Marks) -> None:
        self._stub = stub
        self._load = load
        self._marks = marks
        self._numbers: dict[int, int] = {}
        self._next_id = 0
        self.answered: set[int] = set()
        """Sequences that have received a token."""

    async def run(self, numbers: Sequence[int]) -> None:
        """Runs until cancelled. Raises LoadFailed."""
        call: Any = self._stub.RouteMany()
        try:
            await call.write(router_pb2.RouteManyRequest(calls=[self._call(number) for number in numbers]))
            while (message := await call.read()) is not grpc.aio.EOF:
                self._marks.message("router to gateway")
                if again := self._take(message):
                    await call.write(router_pb2.RouteManyRequest(calls=again))
            raise LoadFailed("the router ended the stream")
        except grpc.RpcError as error:
            raise LoadFailed(f"the stream broke: {error}") from error
        finally:
            call.cancel()

    def _take(self, message: router_pb2.RouteManyResponse) -> list[router_pb2.RouteCall]:
        """Returns the requests to send next."""
        now_s = time.monotonic()
        for error in message.errors:
            raise LoadFailed(f"{error.reason}: {error.message}")
        again = []
        for response in message.responses:
            if response.phase:
                continue
            number = self._numbers[response.call_id]
            self.answered.add(number)
            self._marks.received(number, now_s)
            if response.finish_reason:
                del self._numbers[response.call_id]
                again.append(self._call(number))
        return again

    def _call(self, number: int) -> router_pb2.RouteCall:
        self._next_id += 1
        self._numbers[self._next_id] = number
        request = router_pb2.RouteRequest(
            request_id=f"load-{number}",
            tenant="load",
            model=MODEL,
            prompt_token_ids=[number] * self._load.prompt_tokens,
            sampling=sequence.Sampling(top_p=1),
            # Different lengths, so that answers do not all end in the same step.
            stopping=sequence.Stopping(max_new_tokens=self._load.max_tokens // 2 + number * 37 % self._load.max_tokens),
        )
        return router_pb2.RouteCall(call_id=self._next_id, request=request, timeout_us=600_000_000)


async def measure(load: Load, store: MetadataStore, router: LeaseRecord) -> dict[str, Any]:
    """Raises LoadFailed."""
    marks = Marks()
    async with AsyncExitStack() as stack:
        await _serve_fleet(stack, load, store, marks)
        channel = await stack.enter_async_context(connect_to(Role.ROUTER, None)(router.address))
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await _assembled(stub, load)
        clients = await stack.enter_async_context(_asking(stub, load, marks))
        await _until_all_answered(clients, load)
        await _watched(clients, _SETTLE_S)
        with _window(marks, router.pid) as found:
            await _watched(clients, load.seconds)
        return {**asdict(load), "targets": load.num_targets, "drafts": load.num_drafts, **found}


async def _serve_fleet(stack: AsyncExitStack, load: Load, store: MetadataStore, marks: Marks) -> None:
    for _ in range(load.num_targets):
        target = PacedTarget(
            marks,
            step_s=1 / load.steps_per_s,
            accuracy=load.accuracy,
            draft_step_s=load.draft_step_s,
            model=MODEL,
            max_sequences=2 * load.per_target,
            # Room for all at their longest: a full target would make requests wait, and the router do less.
            num_blocks=load.per_target * MAX_CONTEXT_LEN // 16,
        )
        await stack.enter_async_context(serving_target(target))
        await stack.enter_async_context(store.register(target.info, target.address, worker_pb2.WorkerLoad))
    for _ in range(load.num_drafts):
        # A router sees only the lease of a draft.
        sizes = {"vocab_size": VOCAB_SIZE, "max_context_len": MAX_CONTEXT_LEN, "max_sequences": 2 * load.per_draft}
        info = fake_info(worker_pb2.WORKER_ROLE_DRAFT, **sizes)
        await stack.enter_async_context(store.register(info, "127.0.0.1:1", worker_pb2.WorkerLoad))


async def _assembled(stub: router_pb2_grpc.RouterServiceAsyncStub, load: Load) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                for model in (await stub.ListModels(router_pb2.ListModelsRequest())).models:
                    if (model.num_targets, model.num_drafts) == (load.num_targets, load.num_drafts):
                        return
                await asyncio.sleep(0.1)
    raise LoadFailed("the router did not find the fleet")


@dataclass(slots=True)
class _Asking:
    clients: list[Client]
    tasks: list[asyncio.Task[None]]


@asynccontextmanager
async def _asking(stub: router_pb2_grpc.RouterServiceAsyncStub, load: Load, marks: Marks) -> AsyncIterator[_Asking]:
    clients = [Client(stub, load, marks) for _ in range(load.gateways)]
    tasks = [
        asyncio.create_task(client.run(range(1 + i, 1 + load.sequences, load.gateways)))
        for i, client in enumerate(clients)
    ]
    try:
        yield _Asking(clients, tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_all_answered(asking: _Asking, load: Load) -> None:
    give_up_s = time.monotonic() + _TIMEOUT_S
    while sum(len(client.answered) for client in asking.clients) < load.sequences:
        if time.monotonic() > give_up_s:
            raise LoadFailed("not every sequence was answered")
        await _watched(asking, 0.1)


async def _watched(asking: _Asking, seconds: float) -> None:
    """Waits. Raises the error of a client that ended meanwhile."""
    done, _ = await asyncio.wait(asking.tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


@contextmanager
def _window(marks: Marks, router_pid: int) -> Any:
    """Records messages and the processor time of router and fleet during the block; fills the dict at its end."""
    found: dict[str, Any] = {}
    processes = {"router": psutil.Process(router_pid), "fleet": psutil.Process()}
    before = {name: _cpu_s(process) for name, process in processes.items()}
    started_s = time.monotonic()
    marks.recording = True
    yield found
    marks.recording = False
    window_s = time.monotonic() - started_s
    found.update({f"{name}_cpu_s": _cpu_s(process) - before[name] for name, process in processes.items()})
    found |= {
        "window_s": window_s,
        "steps": marks.num_steps,
        "commits": marks.num_commits,
        "opened": marks.num_opened,
        "tokens": marks.num_tokens,
        "messages": dict(marks.num_messages),
        "to_client_ms": percentiles(marks.to_client_s),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the maximum, in milliseconds. Raises LoadFailed when nothing arrived."""
    if not seconds:
        raise LoadFailed("nothing arrived in the time measured")
    ordered = sorted(seconds)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(1e3 * ordered[math.ceil(place * len(ordered)) - 1], 3) for name, place in places.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def pin(pid: int, core: int) -> None:
    """Pins all threads of a running process."""
    for thread in psutil.Process(pid).threads():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {core})


async def _main(metadata_url: str, loads: list[Load], router_core: int) -> list[dict[str, Any]]:
    async with MetadataStore.connect(metadata_url) as store:
        router = await _router(store)
        pin(router.pid, router_core)
        return [await measure(load, store, router) for load in loads]


async def _router(store: MetadataStore) -> LeaseRecord:
    with suppress(TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                if routers := await store.workers(worker_pb2.WORKER_ROLE_ROUTER):
                    return routers[0]
                await asyncio.sleep(0.1)
    raise LoadFailed("no router holds a lease")


if __name__ == "__main__":
    given = json.load(sys.stdin)
    try:
        loads = [Load(**one) for one in given["loads"]]
        measured = asyncio.run(_main(given["metadata_url"], loads, given["router_core"]))
    except LoadFailed as failure:
        sys.exit(str(failure))
    json.dump(measured, sys.stdout)
