"""The target service over real gRPC, on a real model: what a router sees, and what it cannot break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from outrider.engine import EngineConfig
from outrider.errors import Code
from outrider.metadata import LeaseRecord
from outrider.metadata.store import MetadataStore
from outrider.prefix import block_hashes
from outrider.rpc.channel import create_channel
from outrider.rpc.server import create_server, serving
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.sim.stack import limits_of, target_worker
from outrider.speculation import Grammar
from outrider.target.config import TargetConfig
from outrider.target.grammars.grammar import GrammarCompiler
from outrider.target.process import load, serve
from outrider.target.service import TargetServicer
from outrider.testing.tiny import tiny_tokenizer
from outrider.worker.process import RunningWorker

from tests.redis_server import EmbeddedServer

NUM_BLOCKS = 160
ENGINE = EngineConfig(dtype="bfloat16", num_blocks=NUM_BLOCKS, max_batch_tokens=96)
BY_TORCH = replace(ENGINE, dtype="float32")
"""Ten times as slow as the kernels: for what has to happen while a sequence runs."""
GREEDY = sp.Sampling(temperature=0, top_p=1)
SAMPLED = sp.Sampling(temperature=0.8, top_p=0.95, seed=5)


def open_sequence(sequence_id: int, prompt: Sequence[int], **changes: object) -> sp.OpenSequence:
    sound: dict[str, object] = {
        "sequence_id": sequence_id,
        "prompt_token_ids": prompt,
        "sampling": GREEDY,
        "mode": sp.VERIFICATION_MODE_GREEDY,
        "stopping": sp.Stopping(max_new_tokens=20),
        "speculation": sp.Speculation(max_draft_tokens=4),
    }
    return sp.OpenSequence(**{**sound, **changes})  # type: ignore[arg-type]


class Router:
    """One stream, and everything heard on it."""

    def __init__(self, stub: target_pb2_grpc.TargetServiceAsyncStub, timeout_s: float | None = None) -> None:
        self.call = stub.Verify(timeout=timeout_s)
        self.text: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}
        self.errors: dict[int, sp.SequenceError] = {}
        self.draft_errors: list[sp.SequenceError] = []
        self.responses: list[target_pb2.VerifyResponse] = []

    async def send(self, **parts: object) -> None:
        await self.call.write(target_pb2.VerifyRequest(**parts))  # type: ignore[arg-type]

    async def read(self) -> target_pb2.VerifyResponse:
        response = await asyncio.wait_for(self.call.read(), 600)
        assert isinstance(response, target_pb2.VerifyResponse), "the stream ended"
        self.responses.append(response)
        for commit in response.commits:
            self.text.setdefault(commit.sequence_id, []).extend(commit.token_ids)
            if commit.finish_reason:
                self.finish[commit.sequence_id] = commit.finish_reason
        for error in response.errors:
            self.errors[error.sequence_id] = error
        self.draft_errors.extend(response.draft_errors)
        return response

    async def finished(self, *ids: int) -> None:
        """Reads until each of these has finished or failed."""
        while any(i not in self.finish and i not in self.errors for i in ids):
            await self.read()


@contextlib.asynccontextmanager
async def running_target(
    checkpoint: Path, engine: EngineConfig = ENGINE, **changes: Any
) -> AsyncIterator[tuple[RunningWorker[TargetServicer], target_pb2_grpc.TargetServiceAsyncStub]]:
    config = TargetConfig(model=str(checkpoint), listen="127.0.0.1:0", engine=engine, max_sequences=40, **changes)
    async with serve(config, *load(config)) as running, create_channel(running.life.address) as channel:
        yield running, target_pb2_grpc.TargetServiceStub(channel)  # type: ignore[misc]


@contextlib.asynccontextmanager
async def target(
    checkpoint: Path, **changes: object
) -> AsyncIterator[tuple[TargetServicer, target_pb2_grpc.TargetServiceAsyncStub]]:
    async with running_target(checkpoint, **changes) as (running, stub):
        yield running.servicer, stub


Answer = Callable[[int, int], sp.Draft]


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers each opening and each commit with what `answer` makes of the sequence's id and length.

    Without it, says once that it has no guess. From then on it is waited for.
    """

    def __init__(self, answer: Answer | None) -> None:
        self.answer = answer
        self.address = ""
        self.requests: list[draft_pb2.DraftRequest] = []

    def assigned(self, sequence_id: int) -> sp.DraftAssignment:
        return sp.DraftAssignment(worker_id="draft-1", address=self.address, sequence_id=sequence_id)

    async def GetInfo(self, request: object, context: object) -> draft_pb2.DraftServiceGetInfoResponse:
        return draft_pb2.DraftServiceGetInfoResponse(info=worker_pb2.WorkerInfo(worker_id="draft-1"))

    async def Draft(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async for request in requests:
            self.requests.append(request)
            lengths = {o.sequence_id: len(o.prompt_token_ids) + len(o.committed_token_ids) for o in request.opens}
            if self.answer is None:
                drafts = [sp.Draft(sequence_id=number, base_len=length) for number, length in lengths.items()]
            else:
                lengths |= {commit.sequence_id: commit.base_len + len(commit.token_ids) for commit in request.commits}
                drafts = [self.answer(*one) for one in lengths.items()]
            await context.write(draft_pb2.DraftResponse(drafts=drafts))


@contextlib.asynccontextmanager
async def target_and_draft(
    checkpoint: Path, answer: Answer | None = None, **changes: object
) -> AsyncIterator[tuple[TargetServicer, target_pb2_grpc.TargetServiceAsyncStub, ScriptedDraft]]:
    draft, server = ScriptedDraft(answer), create_server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    # By the kernels an answer would end before its draft is connected.
    targeted = target(checkpoint, engine=BY_TORCH, **changes)
    async with serving(server, "127.0.0.1:0", services=[]) as life, targeted as (servicer, stub):
        draft.address = life.address
        info = worker_pb2.WorkerInfo(worker_id="draft-1")

        async def leases() -> list[LeaseRecord]:
            return [LeaseRecord(info, worker_pb2.WorkerLoad(), life.address, 1)]

        servicer.drafts.links._leases.read = leases
        yield servicer, stub, draft


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_who_the_worker_is_and_how_it_fares(tiny: Path) -> None:
    async with target(tiny) as (_, stub):
        reply = await stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
    info = reply.info
    assert (info.role, info.model, info.vocab_size) == (worker_pb2.WORKER_ROLE_TARGET, tiny.name, 384)
    assert (info.max_context_len, info.block_size, info.num_blocks) == (512, 16, NUM_BLOCKS)
    assert info.protocol_version == 1
    assert info.worker_id.startswith("target-")
    assert info.tokenizer_fingerprint
    assert info.model_revision
    assert reply.load == worker_pb2.WorkerLoad(num_free_blocks=NUM_BLOCKS)


async def test_commits_carry_the_step_they_come_from(tiny: Path) -> None:
    async with target(tiny) as (_, stub):
        router = Router(stub)
        await router.send(
            opens=[open_sequence(1, [5, 6, 7]), open_sequence(2, [8, 9], stopping=sp.Stopping(max_new_tokens=3))]
        )
        await router.finished(1, 2)
    assert router.finish == {1: sp.FINISH_REASON_LENGTH, 2: sp.FINISH_REASON_LENGTH}
    assert {i: len(text) for i, text in router.text.items()} == {1: 20, 2: 3}
    first = router.responses[0]
    assert first.step_us > 0
    assert (first.batch_sequences, first.batch_tokens) == (2, 5)
    bases = [c.base_len for r in router.responses for c in r.commits if c.sequence_id == 1]
    assert bases == list(range(3, 23))


async def test_drafts_over_the_wire_change_the_rounds_and_not_the_text(tiny: Path) -> None:
    stopping = sp.Stopping(max_new_tokens=200)
    for sampling, mode in ((GREEDY, sp.VERIFICATION_MODE_GREEDY), (SAMPLED, sp.VERIFICATION_MODE_COUPLED)):
        plain: list[int] = []

        def guess(sequence_id: int, base_len: int, plain: list[int] = plain) -> sp.Draft:
            done = base_len - 3
            return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=[*plain[done : done + 2], 9, 9])

        async with target_and_draft(tiny, guess) as (_, stub, draft):
            router = Router(stub)
            how = {"sampling": sampling, "mode": mode, "stopping": stopping}
            await router.send(opens=[open_sequence(1, [5, 6, 7], **how)])
            await router.finished(1)
            plain += router.text[1]
            rounds = len(router.responses)
            held = sp.Speculation(max_draft_tokens=4, max_wait_us=5_000_000)
            await router.send(opens=[open_sequence(2, [5, 6, 7], speculation=held, draft=draft.assigned(22), **how)])
            await router.finished(2)
        assert router.text[2] == plain and len(plain) == 200
        # Those before the draft was connected are plain.
        assert len(router.responses) - rounds < 0.8 * rounds
        accepted = sum(c.num_accepted for r in router.responses for c in r.commits if c.sequence_id == 2)
        assert accepted >= 40


def malformed_drafts(sequence_id: int) -> list[tuple[str, sp.Draft]]:
    q = sp.DraftDistribution(token_ids=[5], counts=[65536])
    sound = {"sequence_id": sequence_id, "base_len": 3, "token_ids": [5], "q": [q], "sampling": SAMPLED}

    def draft(**changes: object) -> sp.Draft:
        return sp.Draft(**{**sound, **changes})  # type: ignore[arg-type]

    other = sp.Sampling(temperature=0.7, top_p=0.95, seed=5)
    bad_sum = sp.DraftDistribution(token_ids=[5, 6], counts=[65536, 1])
    elsewhere = sp.DraftDistribution(token_ids=[6], counts=[65536])
    outside = sp.DraftDistribution(token_ids=[5, 400], counts=[65535, 1])
    return [
        ("token_ids", draft(token_ids=[400])),
        ("token_ids", draft(token_ids=[5] * 5000)),
        ("parents", draft(token_ids=[5, 5], q=[q, q], parents=[-1, -1])),
        ("q", draft(q=[])),
        ("q", draft(q=[q, q])),
        ("q", draft(q=[bad_sum])),
        ("q", draft(q=[elsewhere])),
        ("q", draft(q=[outside])),
        ("sampling", draft(sampling=other)),
        ("sampling", draft(sampling=sp.Sampling(temperature=float("nan"), top_p=1))),
        ("sampling", draft(sampling=None)),
    ]


async def test_a_malformed_draft_is_refused_by_name_and_its_sequence_goes_on(tiny: Path) -> None:
    bad = {number: malformed_drafts(number)[number - 1] for number in range(1, len(malformed_drafts(0)) + 1)}
    stopping = sp.Stopping(max_new_tokens=100)
    ratio = {"sampling": SAMPLED, "mode": sp.VERIFICATION_MODE_RATIO, "stopping": stopping}
    async with target_and_draft(tiny, lambda number, _: bad[number][1]) as (servicer, stub, draft):
        router = Router(stub)
        opens = [open_sequence(100 + number, [5, 6, 7], draft=draft.assigned(number), **ratio) for number in bad]
        await router.send(opens=[*opens, open_sequence(1, [7])])
        await router.finished(1, *(100 + number for number in bad))
        assert servicer.stats.num_refused_drafts == len(bad)
    assert not router.errors
    assert {i: len(text) for i, text in router.text.items()} == {1: 20} | {100 + number: 100 for number in bad}
    errors = {error.sequence_id: error for error in router.draft_errors}
    assert len(router.draft_errors) == len(errors) == len(bad)
    for number, (field, _) in bad.items():
        assert errors[number].field.startswith(field), f"{errors[number].field} for {field}"
        assert errors[number].code == Code.INVALID_ARGUMENT


BAD: list[tuple[str, dict[str, object]]] = [
    ("prompt_token_ids", {"prompt_token_ids": []}),
    ("prompt_token_ids[0]", {"prompt_token_ids": [384]}),
    ("prompt_token_ids", {"prompt_token_ids": [5] * 600}),
    ("sampling.temperature", {"sampling": sp.Sampling(temperature=float("nan"), top_p=1)}),
    ("sampling.top_p", {"sampling": sp.Sampling(temperature=0.5, top_p=0)}),
    ("mode", {"mode": sp.VERIFICATION_MODE_UNSPECIFIED}),
    ("stopping.max_new_tokens", {"stopping": sp.Stopping()}),
    ("speculation.max_draft_tokens", {"speculation": sp.Speculation(max_draft_tokens=1000)}),
    ("cache_salt", {"cache_salt": b"x" * 1000}),
]


async def test_a_bad_opening_ends_itself_by_name_and_nothing_else(tiny: Path) -> None:
    async with target(tiny) as (servicer, stub):
        router = Router(stub)
        bad = [open_sequence(number, [5, 6], **changes) for number, (_, changes) in enumerate(BAD, 2)]
        await router.send(opens=[open_sequence(1, [5, 6]), *bad])
        await router.finished(*range(1, len(BAD) + 2))
        assert servicer.steps.load.num_sequences == 0
    assert set(router.text) == {1} and len(router.text[1]) == 20
    assert [router.errors[number].field for number in range(2, len(BAD) + 2)] == [field for field, _ in BAD]
    assert {error.reason for error in router.errors.values()} == {"INVALID_FIELD"}


async def test_bad_settings_end_their_sequence_and_unknown_ids_nothing(tiny: Path) -> None:
    async with target(tiny) as (servicer, stub):
        router = Router(stub)
        await router.send(
            opens=[open_sequence(1, [5, 6]), open_sequence(2, [5, 6])],
            settings=[
                sp.SetSpeculation(sequence_id=2, speculation=sp.Speculation(max_wait_us=2**32 - 1)),
                sp.SetSpeculation(sequence_id=99, speculation=sp.Speculation()),
            ],
            set_drafts=[target_pb2.SetDraft(sequence_id=97)],
            closes=[sp.CloseSequence(sequence_id=98)],
        )
        await router.finished(1, 2)
        assert servicer.stats.num_unknown == 2
    assert router.errors[2].field == "speculation.max_wait_us"
    assert set(router.errors) == {2}


LONG = sp.Stopping(max_new_tokens=400)


@pytest.mark.parametrize("how", ["cancel", "half-close", pytest.param("deadline", marks=pytest.mark.slow)])
async def test_however_a_stream_ends_its_sequences_are_closed(tiny: Path, how: str) -> None:
    async with target_and_draft(tiny) as (servicer, stub, draft):
        other = Router(stub)
        await other.send(opens=[open_sequence(1, [9], stopping=LONG)])
        router = Router(stub, timeout_s=2.0 if how == "deadline" else None)
        held = sp.Speculation(max_draft_tokens=4, max_wait_us=9_000_000)
        opening = open_sequence(1, [5, 6], stopping=LONG, speculation=held, draft=draft.assigned(11))
        await router.send(opens=[opening])
        await router.read()
        if how == "cancel":
            router.call.cancel()
        elif how == "half-close":
            await router.call.done_writing()
        await other.finished(1)
        assert len(other.text[1]) == 400
        await until(lambda: servicer.steps.load.num_free_blocks == NUM_BLOCKS)


class SlowCompiler(GrammarCompiler):
    """Compiles once it is let."""

    let = threading.Event()

    def compile(self, grammar: str, committed: Sequence[int]) -> Grammar:
        self.let.wait(60)
        return super().compile(grammar, committed)


async def test_a_grammar_that_is_compiled_stops_no_other_sequence(tiny: Path) -> None:
    pytest.importorskip("llguidance")
    engine, info = load(TargetConfig(model=str(tiny), listen="127.0.0.1:0", engine=ENGINE, max_sequences=4))
    compiler = SlowCompiler(tiny, info.vocab_size, engine.info.eos_token_ids)
    limits = replace(limits_of(engine.info, 64), grammars=compiler)
    worker = target_worker(engine, limits, time.monotonic, max_batch_tokens=40)
    async with TargetServicer(worker, info, limits) as servicer:
        server = create_server()
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
        async with serving(server, "127.0.0.1:0", services=[]) as life, create_channel(life.address) as channel:
            stub: target_pb2_grpc.TargetServiceAsyncStub = target_pb2_grpc.TargetServiceStub(channel)  # type: ignore[assignment]
            router, stops = Router(stub), sp.Stopping(max_new_tokens=20, stop_token_ids=engine.info.eos_token_ids)
            for number, grammar in enumerate(['start: "yes"', "start: (", 'start: "no"'], start=1):
                logits = sp.LogitsOptions(grammar=grammar, repetition_penalty=1)
                await router.send(opens=[open_sequence(number, [5, 6], stopping=stops, logits=logits)])
            await router.send(opens=[open_sequence(9, [5, 6])], closes=[sp.CloseSequence(sequence_id=3)])
            await router.finished(9)
            assert not router.errors and set(router.text) == {9}
            compiler.let.set()
            await router.finished(1, 2)
            router.call.cancel()
    assert tiny_tokenizer(info.vocab_size).decode(router.text[1][:-1]) == "yes"
    assert router.errors[2].field == "logits.grammar"
    assert 3 not in router.text


async def test_a_prefill_of_many_steps_is_heard_of_before_its_first_token(tiny: Path) -> None:
    """A router tells it so from a worker that hangs, however long it takes."""
    config = TargetConfig(model=str(tiny), listen="127.0.0.1:0", engine=BY_TORCH, max_sequences=4)
    engine, info = load(config)
    limits = limits_of(engine.info, 4)
    worker = target_worker(engine, limits, time.monotonic, max_batch_tokens=40)
    async with TargetServicer(worker, info, limits, max_silence_s=0.0) as servicer:
        server = create_server()
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
        async with serving(server, "127.0.0.1:0", services=[]) as life, create_channel(life.address) as channel:
            stub: target_pb2_grpc.TargetServiceAsyncStub = target_pb2_grpc.TargetServiceStub(channel)  # type: ignore[assignment]
            router, idle = Router(stub), Router(stub)
            await idle.send()
            await router.send(opens=[open_sequence(1, [i % 300 for i in range(400)])])
            await router.finished(1)
            idle.call.cancel()
    first_commit = next(i for i, response in enumerate(router.responses) if response.commits)
    # Of 10 steps; what a busy machine says of several at once is one response.
    assert first_commit >= 4
    for response in router.responses[:first_commit]:
        assert response.batch_tokens > 0 and not response.errors


async def test_the_drain_finishes_what_runs_and_refuses_what_comes(tiny: Path) -> None:
    async with running_target(tiny, BY_TORCH) as (running, stub):
        router = Router(stub)
        await router.send(opens=[open_sequence(1, [5, 6], stopping=LONG)])
        await router.read()
        drained = asyncio.create_task(running.drain(timeout_s=20))
        await asyncio.sleep(0)
        await router.send(opens=[open_sequence(2, [5, 6])])
        await router.finished(1, 2)
        await drained
    assert len(router.text[1]) == 400
    assert router.errors[2].code == Code.UNAVAILABLE


@pytest.mark.slow
async def test_the_process_serves_and_drains_on_sigterm(tiny: Path) -> None:
    arguments = ["--model", str(tiny), "--listen", "127.0.0.1:0", "--dtype", "float32", "--threads", "1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.target", *arguments, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    lines: list[str] = []
    # A start is some 6 s of processor time.
    async with asyncio.timeout(110):
        while not lines or " serves " not in lines[-1]:
            line = (await process.stderr.readline()).decode()
            assert line, f"it ended: {lines}"
            lines.append(line)
        address = json.loads(lines[-1])["message"].split()[-1]
        async with create_channel(address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            router = Router(target_pb2_grpc.TargetServiceStub(channel))  # type: ignore[arg-type]
            await router.send(opens=[open_sequence(1, [5, 6], stopping=LONG)])
            await router.read()
            process.send_signal(signal.SIGTERM)
            await router.finished(1)
        assert await process.wait() == 0
    assert len(router.text[1]) == 400


@pytest.mark.slow
async def test_an_unusable_model_ends_the_process_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    arguments = ["--model", str(tmp_path), "--listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.target", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert len(said.decode().splitlines()) == 1
    assert "pytorch_model.bin" in said.decode()


async def test_the_lease_and_the_prefix_index_tell_what_the_worker_has(tiny: Path, tmp_path: Path) -> None:
    prompt = list(range(10, 60))
    with EmbeddedServer.start(tmp_path / "metadata") as metadata:
        async with MetadataStore.connect(metadata.url, call_timeout_s=2.0) as store:
            async with target(tiny, metadata_url=metadata.url) as (servicer, stub):
                router = Router(stub)
                await router.send(opens=[open_sequence(1, prompt, cache_salt=b"tenant")])
                await router.finished(1)
                (lease,) = await store.workers(worker_pb2.WORKER_ROLE_TARGET)
                assert lease.info == servicer.info
                hashes = block_hashes(prompt, 16, b"tenant")
                async with asyncio.timeout(600):
                    role, ids = worker_pb2.WORKER_ROLE_TARGET, [servicer.info.worker_id]
                    while not (found := await store.lookup_prefix(role, hashes, ids)):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                assert found == {servicer.info.worker_id: 3}
            assert await store.workers(worker_pb2.WORKER_ROLE_TARGET) == []


async def test_a_step_that_hangs_is_not_live(tiny: Path) -> None:
    released = threading.Event()

    def hang() -> None:
        released.wait(120)

    async with running_target(tiny, step_timeout_s=0.5) as (running, stub):
        url = f"http://{running.ops_address}/livez"
        assert (await asyncio.to_thread(urllib.request.urlopen, url)).status == 200
        worker = running.servicer.steps._machine  # type: ignore[attr-defined]
        step, worker.step = worker.step, hang
        try:
            await Router(stub).send(opens=[open_sequence(1, [5, 6])])
            async with asyncio.timeout(600):
                with pytest.raises(urllib.error.HTTPError) as caught:
                    while await asyncio.to_thread(urllib.request.urlopen, url):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            assert (caught.value.code, caught.value.read().startswith(b"step: ")) == (503, True)
            # The gRPC health check sees nothing of it: the event loop comes round.
            async with create_channel(running.life.address) as channel:
                health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        finally:
            worker.step = step
            released.set()


async def test_metrics_add_up_to_what_was_committed(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def wrong(sequence_id: int, base_len: int) -> sp.Draft:
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=[400])

    async with target_and_draft(tiny, wrong) as (servicer, stub, draft):
        router = Router(stub)
        long = open_sequence(2, [7, 8], stopping=LONG, draft=draft.assigned(22))
        await router.send(opens=[open_sequence(1, [5, 6, 7]), long])
        await router.finished(1, 2)
        await until(lambda: servicer.steps.load.num_sequences == 0)
        (url,) = [m.split()[-1] + "/metrics" for m in caplog.messages if m.startswith("ops port")]
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        num_steps = servicer.stats.num_steps
    label = f'{{model_name="{tiny.name}"}}'
    for name, value in {
        "generation_tokens_total": 420,
        "prompt_tokens_total": 5,
        "refused_drafts_total": 1,
        "num_requests_running": 0,
        "step_duration_seconds_count": num_steps,
    }.items():
        assert f"outrider_{name}{label} {value:.1f}" in text.splitlines()
