"""A KV cache that is too small for all at once: sequences are preempted and recomputed, and no text changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.served import SMALL, Loaded, loaded, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

COUPLED = {"sampling": sp.Sampling(temperature=0.8, top_p=0.95, seed=5), "mode": sp.VERIFICATION_MODE_COUPLED}
REQUESTS = 24


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path) -> Iterator[Loaded]:
    # Room for some eight of these sequences.
    engine = {"num_blocks": 26, "max_batch_tokens": 64}
    with loaded(tiny_vllm, f"{SMALL} --block-size=32 --max-model-len=256", engine=engine) as made:
        yield made


def opening(number: int, **changes: object) -> sp.OpenSequence:
    rng = random.Random(number)
    prompt = [rng.randrange(3, 259) for _ in range(rng.randint(5, 40))]
    mode = COUPLED if number % 2 else {}
    return open_sequence(number, prompt, stopping=sp.Stopping(max_new_tokens=60), **mode, **changes)


async def test_preempted_sequences_go_on_with_the_same_text(engine: Loaded) -> None:
    rng, free, numbers = random.Random(1), engine.num_free_blocks, range(1, REQUESTS + 1)
    wanted: dict[int, list[int]] = {}

    def drafts(sequence_id: int, base_len: int) -> sp.Draft:
        number = sequence_id % 100
        text = wanted.get(number, [])
        done = base_len - len(opening(number).prompt_token_ids)
        guess = [token if rng.random() < 0.8 else rng.randrange(384) for token in text[done : done + 4]]
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=guess)

    async with served(engine, drafts) as (_, stub, draft):
        router = Router(stub)
        for number in numbers:  # one by one: nothing is preempted
            await router.send(opens=[opening(number)])
            await router.finished(number)
        wanted |= router.text
        assert engine.scheduler.num_preemptions == 0
        for round_, speculation in ((1, sp.Speculation()), (2, sp.Speculation(max_draft_tokens=4))):
            router = Router(stub)
            more = {"speculation": speculation}
            assigned = {number: draft.assigned(number + 100 * round_) for number in numbers}
            opens = [opening(n, draft=assigned[n], **more) for n in numbers]
            await router.send(opens=opens)
            await router.finished(*numbers)
            assert not router.errors
            assert {n: router.text[n] for n in numbers} == wanted
        assert engine.scheduler.num_preemptions > 0
    assert engine.num_free_blocks == free and not engine.scheduler.requests
