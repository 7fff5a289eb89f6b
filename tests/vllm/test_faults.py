"""Processes that die or stop in mid-answer: a draft changes nothing, and a target's texts continue on another one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import worker_pb2

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.processes import drafting, target
from tests.vllm.served import Loaded, loaded, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
# So cool that the text repeats itself: the draft continues what it has seen.
SEEDED = {"sampling": sp.Sampling(temperature=0.1, top_p=0.95, seed=5), "mode": sp.VERIFICATION_MODE_COUPLED}
LENGTH = 400


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path) -> Iterator[Loaded]:
    with loaded(tiny_vllm) as made:
        yield made


def opening(number: int, length: int = LENGTH, **changes: Any) -> sp.OpenSequence:
    made: dict[str, Any] = {"stopping": sp.Stopping(max_new_tokens=length)} | changes
    return open_sequence(number, PROMPT, **made)


@pytest.mark.parametrize("planted", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("mode", [{}, SEEDED], ids=["greedy", "coupled"])
async def test_a_draft_that_dies_or_stops_changes_no_text(
    engine: Loaded, tiny_vllm: Path, planted: signal.Signals, mode: dict[str, Any]
) -> None:
    async with drafting(tiny_vllm) as draft, served(engine) as (servicer, stub, _):
        record = LeaseRecord(draft.info, worker_pb2.WorkerLoad(), draft.address, 1)

        async def leases() -> list[LeaseRecord]:
            return [record]

        servicer.drafts.pool.links._leases.read = leases
        router = Router(stub)
        await router.send(opens=[opening(1, **mode)])
        await router.finished(1)
        assigned = sp.DraftAssignment(worker_id=draft.info.worker_id, address=draft.address, sequence_id=22)
        waiting = sp.Speculation(max_draft_tokens=4, max_wait_us=50_000)
        await router.send(opens=[opening(2, speculation=waiting, draft=assigned, **mode)])
        while sum(c.num_drafted for r in router.responses for c in r.commits) < 8:
            assert 2 not in router.finish, "the text has ended before the draft was used"
            await router.read()
        draft.process.send_signal(planted)
        await router.finished(2)
    assert router.text[2] == router.text[1] and not router.errors


async def test_the_text_of_a_target_that_is_killed_continues_on_another(tiny_vllm: Path) -> None:
    async with target(tiny_vllm) as second:
        async with target(tiny_vllm) as first:
            assert first.info.model_revision == second.info.model_revision
            whole, half = Router(second.stub), Router(first.stub)
            await whole.send(opens=[opening(number, **mode) for number, mode in enumerate(({}, SEEDED), start=1)])
            await whole.finished(1, 2)
            await half.send(opens=[opening(number, **mode) for number, mode in enumerate(({}, SEEDED), start=1)])
            while min(len(half.text.get(number, ())) for number in (1, 2)) < 50:
                await half.read()
            first.process.kill()
            with pytest.raises((AssertionError, grpc.RpcError)):
                while True:
                    await half.read()
        rest = Router(second.stub)
        modes = enumerate(({}, SEEDED), start=1)
        await rest.send(opens=[opening(n, committed_token_ids=half.text[n], **mode) for n, mode in modes])
        await rest.finished(1, 2)
    for number in (1, 2):
        assert len(half.text[number]) < LENGTH
        assert half.text[number] + rest.text.get(number, []) == whole.text[number]


async def test_our_own_engine_is_of_another_revision(engine: Loaded, tiny_vllm: Path) -> None:
    from outrider.engine import EngineConfig
    from outrider.target.config import TargetConfig
    from outrider.target.process import load

    own = TargetConfig(model=str(tiny_vllm), listen="127.0.0.1:0", engine=EngineConfig(dtype="float32"))
    _, info = await asyncio.to_thread(load, own)
    weights, _, arithmetic = info.model_revision.partition("/")
    assert engine.info.model_revision.startswith(f"{weights}/") and arithmetic != engine.info.model_revision
    assert info.model_revision != engine.info.model_revision
    assert info.tokenizer_fingerprint == engine.info.tokenizer_fingerprint
