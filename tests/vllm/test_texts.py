"""A real model on vLLM, in float32: texts with drafts are those of vLLM alone; seeded ones do not depend on drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from outrider.engine import resolve
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.served import Loaded, loaded, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
LENGTH = 24
QUESTIONS = [
    *("What is the capital of France?", "Explain photosynthesis.", "Write a haiku about the sea.", "List five fruits."),
    *("How do I boil an egg?", "Repeat three times: the cat sat on the mat.", "What is 12 times 12?"),
    *("Write a Python function that adds two numbers.", "Who wrote Hamlet?", "Translate 'good morning' to Spanish."),
    *("Name the planets in order.", "Why is the sky blue?", "Give me a recipe for pancakes.", "What does HTTP mean?"),
    *("Write a limerick about a dog.", "Count from one to twenty.", "Describe a rainy day.", "What is a prime?"),
    *("Say one two three one two three one two three.", "Tell me a story about a robot."),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Loaded]:
    with loaded(MODEL, engine={"max_context_len": 512}) as made:
        yield made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(resolve(MODEL)), local_files_only=True)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def alone(engine: Loaded, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy answers by vLLM's engine as it is without a request of ours: no book, no drafts, no seeds."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

    texts: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        name = f"alone-{number}"
        made = EngineCoreRequest(name, list(prompt), None, sampling, None, 0.0, None, None, None)
        engine.core.add_request(Request.from_engine_core_request(made, engine.core.request_block_hasher))
        texts[name] = []
    while engine.scheduler.has_unfinished_requests():
        for group in engine.core.step()[0].values():
            for output in group.outputs:
                texts[output.request_id] += output.new_token_ids
    return list(texts.values())


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


async def test_greedy_texts_with_drafts_are_those_of_vllm_alone(engine: Loaded, prompts: list[list[int]]) -> None:
    wanted = alone(engine, prompts)
    for known in (wanted, [text[1:] for text in wanted]):  # right ones, and ones that are never right
        texts, accepted = await answers(engine, prompts, known)
        assert sum(one == other for one, other in zip(texts, wanted, strict=True)) == len(prompts)
        assert (accepted > 5 * len(prompts)) == (known is wanted)


async def test_seeded_texts_do_not_depend_on_drafts(engine: Loaded, prompts: list[list[int]]) -> None:
    plain, _ = await answers(engine, prompts, **SEEDED)
    drafted, accepted = await answers(engine, prompts, plain, **SEEDED)
    assert drafted == plain and accepted > 5 * len(prompts)
    greedy, _ = await answers(engine, prompts)
    assert sum(one == other for one, other in zip(greedy, plain, strict=True)) < len(prompts) / 2
