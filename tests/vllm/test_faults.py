"""Processes that die or stop in mid-answer: a draft changes nothing, and a target's texts continue on another one."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
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
from tests.vllm.test_texts import PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
# So cool that the text repeats itself: the draft continues what it has seen.
SEEDED = {"sampling": sp.Sampling(temperature=0.1, top_p=0.95, seed=5), "mode": sp.VERIFICATION_MODE_COUPLED}
LENGTH = 400
Texts = dict[int, list[int]]


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

        servicer.drafts.links._leases.read = leases
        router = Router(stub)
        await router.send(opens=[opening(1, **mode)])
        await router.finished(1)
        assigned = sp.DraftAssignment(worker_id=draft.info.worker_id, address=draft.address, sequence_id=22)
        # However long the draft takes here, it is in time; once it has stopped nobody waits so long.
        patient, waiting = (sp.Speculation(max_draft_tokens=4, max_wait_us=us) for us in (5_000_000, 50_000))
        await router.send(opens=[opening(2, speculation=patient, draft=assigned, **mode)])
        while sum(c.num_drafted for r in router.responses for c in r.commits) < 8:
            assert 2 not in router.finish, "the text has ended before the draft was used"
            await router.read()
        await router.send(settings=[sp.SetSpeculation(sequence_id=2, speculation=waiting)])
        draft.process.send_signal(planted)
        await router.finished(2)
    assert router.text[2] == router.text[1] and not router.errors


SHORT = "--vllm-args=--kv-cache-memory-bytes=200000000 --max-model-len=512"
TOKENS, NUMBERS = 80, range(1, 21)
"""Of each text; and the numbers of the sequences, each with a prompt and a seed of its own."""


def ask(wanted: Texts | None = None, held: Texts | None = None) -> list[sp.OpenSequence]:
    """`wanted`: with drafts, looked up in these texts. `held`: continued after these tokens."""
    return [
        open_sequence(
            number,
            PROMPTS[number - 1],
            sampling=sp.Sampling(temperature=0.8, top_p=0.95, seed=1000 + number),
            mode=sp.VERIFICATION_MODE_COUPLED,
            stopping=sp.Stopping(max_new_tokens=TOKENS),
            committed_token_ids=(held or {}).get(number, ()),
            predicted_token_ids=(wanted or {}).get(number, ()),
            speculation=sp.Speculation(max_own_draft_tokens=4 if wanted else 0),
        )
        for number in NUMBERS
    ]


async def answered(stub: Any, opens: Sequence[sp.OpenSequence]) -> Router:
    router = Router(stub)
    await router.send(opens=opens)
    await router.finished(*NUMBERS)
    assert not router.errors
    return router


async def until_killed(first: Running, opens: Sequence[sp.OpenSequence]) -> Texts:
    """What it had committed of each text when it was killed in mid-answer."""
    half = Router(first.stub)
    await half.send(opens=opens)
    while min(len(half.text.get(number, ())) for number in NUMBERS) < 10:
        await half.read()
    first.process.kill()
    with pytest.raises((AssertionError, grpc.RpcError)):
        while True:
            await half.read()
    assert all(len(half.text[number]) < TOKENS for number in NUMBERS)
    return half.text


def joined(half: Texts, rest: Texts) -> Texts:
    return {number: half[number] + rest.get(number, []) for number in NUMBERS}


def num_equal(one: Texts, other: Texts) -> int:
    return sum(one[number] == other[number] for number in NUMBERS)


async def test_texts_of_a_target_that_is_killed_continue_on_another_of_vllm_and_of_our_own_engine(
    tiny_vllm: Path,
) -> None:
    own_engine = running("--model", str(tiny_vllm), "--dtype", "float32", "--max-sequences", "40", "--threads", "1")
    async with target(tiny_vllm, SHORT) as second, own_engine as own:
        off = await answered(second.stub, ask())
        async with target(tiny_vllm, SHORT) as first:
            assert first.info.model_revision == second.info.model_revision
            half = await until_killed(first, ask(off.text))
        moved = await answered(second.stub, ask(off.text, half))
        assert num_equal(joined(half, moved.text), off.text) == 20
        # The same weights in another arithmetic: no token is lost, and what follows may differ.
        assert same_weights(own.info.model_revision, first.info.model_revision)
        assert own.info.model_revision != first.info.model_revision
        elsewhere = await answered(own.stub, ask(held=half))
        assert {len(text) for text in joined(half, elsewhere.text).values()} == {TOKENS}
