"""A target on vLLM, over real gRPC, with drafts that are right, wrong, late, malformed or gone: the text stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import vllm
from outrider.errors import Code
from outrider.gateway.tools.structured import Structured
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import target_pb2
from outrider.vllm.target import machine
from outrider.vllm.target.engine import CachedPrefixes
from outrider.vllm.target.grammar import MaskedGrammar

from tests.integration.target.test_server import Router, open_sequence, until
from tests.vllm.served import Loaded, loaded, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

GREEDY = sp.Sampling(temperature=0, top_p=1)
SAMPLED = sp.Sampling(temperature=0.8, top_p=0.95, seed=5)
MODES = {"greedy": (GREEDY, sp.VERIFICATION_MODE_GREEDY), "coupled": (SAMPLED, sp.VERIFICATION_MODE_COUPLED)}
PROMPT = [5, 6, 7]
WAITING = sp.Speculation(max_draft_tokens=4, max_wait_us=1_000_000)


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path) -> Iterator[Loaded]:
    with loaded(tiny_vllm) as made:
        yield made


def how(mode: str, count: int = 60, **changes: Any) -> dict[str, Any]:
    sampling, rule = MODES[mode]
    return {"sampling": sampling, "mode": rule, "stopping": sp.Stopping(max_new_tokens=count)} | changes


def following(text: Sequence[int], right: int = 3) -> Callable[[int, int], sp.Draft]:
    """Drafts `right` tokens of the text and then one that is wrong."""

    def answer(sequence_id: int, base_len: int) -> sp.Draft:
        done = base_len - len(PROMPT)
        guess = [*text[done : done + right], (text[min(done + right, len(text) - 1)] + 1) % 384]
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=guess)

    return answer


def accepted(router: Router, number: int) -> int:
    return sum(c.num_accepted for r in router.responses for c in r.commits if c.sequence_id == number)


def drafted(router: Router, number: int) -> int:
    return sum(c.num_drafted for r in router.responses for c in r.commits if c.sequence_id == number)


async def plain(engine: Loaded, **changes: Any) -> Router:
    """The answer without a draft, as sequence 1."""
    async with served(engine) as (_, stub, _):
        router = Router(stub)
        await router.send(opens=[open_sequence(1, PROMPT, **changes)])
        await router.finished(1)
    assert not router.errors, router.errors
    return router


@pytest.mark.parametrize("mode", MODES)
async def test_drafts_change_the_rounds_and_not_the_text(engine: Loaded, mode: str) -> None:
    alone = await plain(engine, **how(mode))
    async with served(engine, following(alone.text[1])) as (_, stub, draft):
        router = Router(stub)
        await router.send(opens=[open_sequence(2, PROMPT, **how(mode, speculation=WAITING, draft=draft.assigned(22)))])
        await router.finished(2)
    assert router.text[2] == alone.text[1] and len(router.text[2]) == 60
    assert accepted(router, 2) >= 15
    assert len(router.responses) < 0.9 * len(alone.responses)


async def test_ratio_requests_are_coupled_and_their_text_does_not_depend_on_drafts(engine: Loaded) -> None:
    ratio = how("coupled") | {"mode": sp.VERIFICATION_MODE_RATIO}
    alone = await plain(engine, **ratio)
    assert alone.text == (await plain(engine, **how("coupled"))).text
    async with served(engine, following(alone.text[1])) as (_, stub, draft):
        router = Router(stub)
        await router.send(opens=[open_sequence(2, PROMPT, **ratio, speculation=WAITING, draft=draft.assigned(22))])
        await router.finished(2)
    assert router.text[2] == alone.text[1] and accepted(router, 2) >= 15 and not router.draft_errors


async def test_a_sequence_whose_speculation_is_off_is_never_drafted_for(engine: Loaded) -> None:
    text = (await plain(engine, **how("greedy"))).text[1]
    async with served(engine, following(text)) as (_, stub, draft):
        router, off = Router(stub), sp.Speculation()
        await router.send(opens=[open_sequence(2, PROMPT, **how("greedy", speculation=off, draft=draft.assigned(22)))])
        await router.finished(2)
    assert router.text[2] == text and drafted(router, 2) == 0


async def test_a_cap_that_is_changed_holds_from_the_next_steps_on(engine: Loaded) -> None:
    text = (await plain(engine, **how("greedy", 400))).text[1]
    async with served(engine, following(text)) as (_, stub, draft):
        router = Router(stub)
        long = how("greedy", 400, speculation=WAITING, draft=draft.assigned(22))
        await router.send(opens=[open_sequence(2, PROMPT, **long)])
        while drafted(router, 2) < 20:
            await router.read()
        await router.send(settings=[sp.SetSpeculation(sequence_id=2, speculation=sp.Speculation())])
        before = len(router.responses)
        await router.finished(2)
    after = [c.num_drafted for r in router.responses[before:] for c in r.commits]
    assert router.text[2] == text
    # What was under way when the setting was sent comes first.
    assert len(list(takewhile(lambda count: not count, reversed(after)))) > 50


MALFORMED = {
    "beyond the vocabulary": {"token_ids": [5, 384]},
    "far beyond it": {"token_ids": [2**32 - 1]},
    "too many": {"token_ids": [5] * 5000},
    "inside the prompt": {"token_ids": [5], "base_len": 1},
    "no tree": {"token_ids": [5, 5], "parents": [-1, 7]},
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_draft_is_refused_and_its_sequence_goes_on(engine: Loaded, name: str) -> None:
    text = (await plain(engine, **how("greedy"))).text[1]

    def answer(sequence_id: int, base_len: int) -> sp.Draft:
        return sp.Draft(**{"sequence_id": sequence_id, "base_len": base_len, **MALFORMED[name]})

    async with served(engine, answer) as (servicer, stub, draft):
        router = Router(stub)
        await router.send(
            opens=[open_sequence(2, PROMPT, **how("greedy", speculation=WAITING, draft=draft.assigned(22)))]
        )
        await router.finished(2)
        assert servicer.stats.num_refused_drafts == 1
    assert router.text[2] == text and not router.errors
    assert [error.code for error in router.draft_errors] == [Code.INVALID_ARGUMENT]


@pytest.mark.parametrize("place", ["choose", "committed", "stepped"])
async def test_a_fault_in_scheduler_code_ends_drafting_and_not_the_engine(
    engine: Loaded, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (await plain(engine, **how("coupled"))).text[1]
    calls = 0

    def raising(*arguments: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise RuntimeError("planted")
        return real(*arguments, **options)

    real = getattr(engine.scheduler.book, place)
    monkeypatch.setattr(engine.scheduler.book, place, raising)
    before = engine.scheduler.num_faults
    async with served(engine, following(text)) as (_, stub, draft):
        router = Router(stub)
        await router.send(
            opens=[open_sequence(2, PROMPT, **how("coupled", speculation=WAITING, draft=draft.assigned(22)))]
        )
        await router.finished(2)
        monkeypatch.undo()
        assert engine.scheduler.num_faults > before
        await router.send(opens=[open_sequence(3, PROMPT, **how("coupled"))])
        await router.finished(3)
    assert router.text[2] == router.text[3] == text and not router.errors


class FaultyGrammar:
    """Has no masks, and says so with an error that nobody has foreseen."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    def allowed(self, prefix: Sequence[int]) -> Any:
        raise RuntimeError("planted")


async def test_a_fault_in_a_grammar_ends_its_request_and_one_in_the_names_of_prefixes_none(
    engine: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*arguments: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(machine, "MaskedGrammar", lambda grammar: MaskedGrammar(FaultyGrammar(grammar)))
    monkeypatch.setattr(CachedPrefixes, "_stored", raising)
    formed = sp.LogitsOptions(repetition_penalty=1, grammar=Structured("regex", "[a-f]{3,9}", "field").to_grammar())
    long = [3 + n % 250 for n in range(2 * engine.info.block_size + 5)]
    async with served(engine) as (_, stub, _):
        router = Router(stub)
        await router.send(opens=[open_sequence(1, PROMPT, logits=formed), open_sequence(2, long)])
        await router.finished(1, 2)
        monkeypatch.undo()
        await router.send(opens=[open_sequence(3, PROMPT, logits=formed)])
        await router.finished(3)
    assert set(router.errors) == {1} and router.errors[1].code == Code.INTERNAL
    assert len(router.text[2]) == 20 and router.text[3]


async def test_a_thousand_requests_with_cancels_leave_nothing_behind(engine: Loaded) -> None:
    rng = random.Random(1)
    free = engine.num_free_blocks

    def answer(sequence_id: int, base_len: int) -> sp.Draft:
        guess = [rng.randrange(384) for _ in range(rng.randint(0, 4))]
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=guess)

    async with served(engine, answer) as (servicer, stub, draft):
        router = Router(stub)
        waiting, cancelled, open_now = list(range(1, 1001)), set(), set()
        while waiting or open_now:
            while waiting and len(open_now) < 32:
                number = waiting.pop()
                prompt = [rng.randrange(3, 259) for _ in range(rng.randint(1, 40))]
                mode = rng.choice(list(MODES))
                opening = how(mode, rng.randint(1, 12), draft=draft.assigned(number))
                await router.send(opens=[open_sequence(number, prompt, **opening)])
                open_now.add(number)
                if rng.random() < 0.2:
                    await router.send(closes=[sp.CloseSequence(sequence_id=number)])
                    cancelled.add(number)
                    open_now.discard(number)
            await router.read() if open_now else None
            open_now -= set(router.finish) | set(router.errors)
        await until(lambda: servicer.steps.load.num_sequences == 0)
    assert not router.errors
    assert set(router.finish) | cancelled == set(range(1, 1001))
    assert engine.num_free_blocks == free and not engine.scheduler.requests and not len(engine.scheduler.book)


def test_the_worker_says_what_it_is(engine: Loaded) -> None:
    info = engine.info
    assert (info.vocab_size, info.max_sequences, info.max_draft_tokens) == (384, 40, 8)
    assert info.max_context_len == 512
    assert info.model_revision.partition("/")[2].startswith(f"vllm-{vllm.__version__.partition('+')[0]}")


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        (
            "sampling.temperature",
            {"sampling": sp.Sampling(temperature=0.001, top_p=1, seed=1), "mode": sp.VERIFICATION_MODE_COUPLED},
        ),
        ("prompt_token_ids[0]", {"prompt_token_ids": [384]}),
        ("prompt_token_ids", {"prompt_token_ids": [5] * 600}),
        ("stopping.max_new_tokens", {"stopping": sp.Stopping()}),
    ],
)
async def test_a_bad_opening_ends_itself_by_name_and_nothing_else(
    engine: Loaded, field: str, changes: dict[str, object]
) -> None:
    async with served(engine) as (servicer, stub, _):
        router = Router(stub)
        await router.send(opens=[open_sequence(1, PROMPT), open_sequence(2, PROMPT, **changes)])
        await router.finished(1, 2)
        assert servicer.steps.load.num_sequences == 0
    assert len(router.text[1]) == 20 and router.errors[2].field == field


async def test_set_draft_to_none_leaves_the_text(engine: Loaded) -> None:
    text = (await plain(engine, **how("coupled"))).text[1]
    async with served(engine, following(text)) as (_, stub, draft):
        router = Router(stub)
        await router.send(
            opens=[open_sequence(2, PROMPT, **how("coupled", speculation=WAITING, draft=draft.assigned(22)))]
        )
        await router.read()
        await router.send(set_drafts=[target_pb2.SetDraft(sequence_id=2)])
        await router.finished(2)
    assert router.text[2] == text
