"""Processes that die or stop in mid-answer: a draft changes nothing, and a target's texts continue on another one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import worker_pb2
from outrider_controller.router.fleet.placement import same_weights

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.processes import Running, drafting, running, target
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


SEEDS = [sp.Sampling(temperature=0.8, top_p=0.95, seed=seed) for seed in range(1, 21)]
TEXTS = [{}, *({"sampling": sampling, "mode": sp.VERIFICATION_MODE_COUPLED} for sampling in SEEDS)]
NUMBERS = range(1, len(TEXTS) + 1)


async def ask(router: Router, committed: dict[int, list[int]] | None = None) -> None:
    held = committed or {}
    opens = [opening(n, committed_token_ids=held.get(n, ()), **mode) for n, mode in enumerate(TEXTS, start=1)]
    await router.send(opens=opens)


async def until_killed(first: Running) -> dict[int, list[int]]:
    """What it had committed of each text when it was killed in mid-answer."""
    half = Router(first.stub)
    await ask(half)
    while min(len(half.text.get(number, ())) for number in NUMBERS) < 20:
        await half.read()
    first.process.kill()
    with pytest.raises((AssertionError, grpc.RpcError)):
        while True:
            await half.read()
    assert all(len(half.text[number]) < LENGTH for number in NUMBERS)
    return half.text


async def continued(stub: Any, half: dict[int, list[int]]) -> list[list[int]]:
    rest = Router(stub)
    await ask(rest, half)
    await rest.finished(*NUMBERS)
    assert not rest.errors
    return [half[number] + rest.text.get(number, []) for number in NUMBERS]


async def test_texts_of_a_target_that_is_killed_continue_on_another_of_vllm_and_of_our_own_engine(
    tiny_vllm: Path,
) -> None:
    own_engine = running("--model", str(tiny_vllm), "--dtype", "float32", "--max-sequences", "40", "--threads", "1")
    async with target(tiny_vllm) as second, own_engine as own:
        async with target(tiny_vllm) as first:
            assert first.info.model_revision == second.info.model_revision
            whole = Router(second.stub)
            await ask(whole)
            await whole.finished(*NUMBERS)
            half = await until_killed(first)
        wanted, found = [whole.text[number] for number in NUMBERS], await continued(second.stub, half)
        assert [one == other for one, other in zip(found, wanted, strict=True)].count(True) == len(TEXTS)
        # The same weights in another arithmetic: no token is lost, and what follows may differ.
        assert same_weights(own.info.model_revision, first.info.model_revision)
        assert own.info.model_revision != first.info.model_revision
        elsewhere = await continued(own.stub, half)
        assert all(text[: len(half[number])] == half[number] for number, text in zip(NUMBERS, elsewhere, strict=True))
        assert [len(text) for text in elsewhere] == [LENGTH] * len(TEXTS)
