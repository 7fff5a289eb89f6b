"""A real model on vLLM, in float32: texts with drafts are those of vLLM alone; seeded ones do not depend on drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from outrider.engine import resolve
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.questions import MODEL, chats
from tests.vllm.served import Loaded, loaded, served
from tests.vllm.vllm_alone import alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LENGTH = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return chats()


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    """The greedy answers of vLLM as it is. Its process has ended when the engine of the tests is loaded."""
    return alone(resolve(MODEL), prompts, LENGTH)


@pytest.fixture(scope="module")
def engine(plain: list[list[int]]) -> Iterator[Loaded]:
    with loaded(MODEL, engine={"max_context_len": 512}) as made:
        yield made


async def answers(
    engine: Loaded, prompts: Sequence[Sequence[int]], known: Sequence[Sequence[int]] = (), **changes: Any
) -> tuple[list[list[int]], int]:
    """All at once; with drafts that are right for three tokens and then wrong, where texts are known."""

    def drafts(sequence_id: int, base_len: int) -> sp.Draft:
        text, prompt = known[sequence_id - 1], prompts[sequence_id - 1]
        guess = [*text[base_len - len(prompt) :][:3], 99]
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=guess)

    async with served(engine, drafts) as (_, stub, draft):
        router = Router(stub)
        opens = []
        for number, prompt in enumerate(prompts, start=1):
            own: dict[str, Any] = {"stopping": sp.Stopping(max_new_tokens=LENGTH)} | changes
            if known:
                own |= {"speculation": sp.Speculation(max_draft_tokens=4), "draft": draft.assigned(number)}
            if "sampling" in own:
                own["sampling"] = sp.Sampling(temperature=0.8, top_p=0.95, seed=1000 + number)
            opens.append(open_sequence(number, prompt, **own))
        await router.send(opens=opens)
        await router.finished(*range(1, len(prompts) + 1))
    assert not router.errors
    accepted = sum(c.num_accepted for r in router.responses for c in r.commits)
    return [router.text[number] for number in range(1, len(prompts) + 1)], accepted


SEEDED = {"sampling": sp.Sampling(temperature=0.8, top_p=0.95, seed=1), "mode": sp.VERIFICATION_MODE_COUPLED}


async def test_greedy_texts_with_drafts_are_those_of_vllm_alone(
    engine: Loaded, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    for known in (plain, [text[1:] for text in plain]):  # right ones, and ones that are never right
        texts, accepted = await answers(engine, prompts, known)
        assert sum(one == other for one, other in zip(texts, plain, strict=True)) == len(prompts) == 40
        assert (accepted > 5 * len(prompts)) == (known is plain)


async def test_seeded_texts_do_not_depend_on_drafts(
    engine: Loaded, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    seeded, _ = await answers(engine, prompts, **SEEDED)
    drafted, accepted = await answers(engine, prompts, seeded, **SEEDED)
    assert drafted == seeded and accepted > 5 * len(prompts)
    assert sum(one == other for one, other in zip(seeded, plain, strict=True)) < len(prompts) / 2
