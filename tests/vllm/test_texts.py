"""Forty texts of a target on vLLM, greedy and seeded, with drafts and without: those of vLLM alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.served import Loaded, loaded, served
from tests.vllm.vllm_alone import FIRST_SEED, TEMPERATURE, TOP_P, Answers, alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LENGTH = 24
_RNG = random.Random(4)
PROMPTS = [[_RNG.randrange(3, 259) for _ in range(_RNG.randint(5, 60))] for _ in range(40)]


@pytest.fixture(scope="module")
def plain(tiny_vllm: Path) -> tuple[Answers, Answers]:
    """The answers of vLLM as it is. Its process has ended when the engine of the tests is loaded."""
    return alone(tiny_vllm, PROMPTS, LENGTH)


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path, plain: tuple[Answers, Answers]) -> Iterator[Loaded]:
    with loaded(tiny_vllm) as made:
        yield made


def sampling(number: int, *, seeded: bool) -> dict[str, Any]:
    if not seeded:
        return {}
    drawn = sp.Sampling(temperature=TEMPERATURE, top_p=TOP_P, seed=FIRST_SEED - 1 + number)
    return {"sampling": drawn, "mode": sp.VERIFICATION_MODE_COUPLED}


KNOWN: dict[str, Callable[[Answers], Answers]] = {
    "none": lambda plain: [],
    "right": lambda plain: plain,
    "never right": lambda plain: [text[1:] for text in plain],
}
"""What drafts say of the texts."""


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
async def test_texts_are_those_of_vllm_alone(
    engine: Loaded, plain: tuple[Answers, Answers], seeded: bool, kind: str
) -> None:
    wanted = plain[seeded]
    known = KNOWN[kind](wanted)

    def drafts(sequence_id: int, base_len: int) -> sp.Draft:
        text, prompt = known[sequence_id - 1], PROMPTS[sequence_id - 1]
        guess = [*text[base_len - len(prompt) :][:3], 99]
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=guess)

    async with served(engine, drafts) as (_, stub, draft):
        router = Router(stub)
        opens = []
        for number, prompt in enumerate(PROMPTS, start=1):
            own: dict[str, Any] = {"stopping": sp.Stopping(max_new_tokens=LENGTH)} | sampling(number, seeded=seeded)
            if known:
                own |= {"speculation": sp.Speculation(max_draft_tokens=4), "draft": draft.assigned(number)}
            opens.append(open_sequence(number, prompt, **own))
        await router.send(opens=opens)
        await router.finished(*range(1, len(PROMPTS) + 1))
    assert not router.errors
    found = [router.text[number] for number in range(1, len(PROMPTS) + 1)]
    assert sum(one == other for one, other in zip(found, wanted, strict=True)) == len(PROMPTS) == 40
    accepted = sum(commit.num_accepted for response in router.responses for commit in response.commits)
    assert (accepted > 5 * len(PROMPTS)) == (kind == "right")
