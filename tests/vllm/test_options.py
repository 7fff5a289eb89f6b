"""The table in docs/vllm.md, row by row: the answer is the same with drafts, without, and when it is continued from its
middle, as after a failover; or the option is refused and the field is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider.gateway.tools.structured import Structured
from outrider.prefix import block_hashes
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.testing.tiny import tiny_tokenizer

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.served import Loaded, loaded, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROMPT = [5, 6, 7, 300, 301, 40, 41]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}
WAITING = sp.Speculation(max_draft_tokens=4, max_wait_us=1_000_000)
SAMPLED = {"sampling": sp.Sampling(temperature=0.9, top_p=1, seed=11), "mode": sp.VERIFICATION_MODE_COUPLED}
LENGTH = 48
_PAGE = Path(__file__).parents[2] / "docs/vllm.md"


def sampled(**changes: Any) -> dict[str, Any]:
    return SAMPLED | {"sampling": sp.Sampling(**({"temperature": 0.9, "top_p": 1, "seed": 11} | changes))}


def logits(**options: Any) -> list[dict[str, Any]]:
    """In both rules."""
    made = {"logits": sp.LogitsOptions(**({"repetition_penalty": 1} | options))}
    return [made, SAMPLED | made]


def grammar(kind: Any, value: Any) -> list[dict[str, Any]]:
    stopping = {"stopping": sp.Stopping(max_new_tokens=LENGTH, stop_token_ids=[2])}
    return [each | stopping for each in logits(grammar=Structured(kind, value, "field").to_grammar())]


CASES: dict[str, list[dict[str, Any]]] = {
    "temperature 0": [{}],
    "temperature 0.01 and more": [sampled(), sampled(temperature=0.01), sampled(temperature=1.7, seed=2**64 - 1)],
    "temperature above 0 and below 0.01": [sampled(temperature=0.009)],
    "top_k, top_p, min_p": [sampled(top_k=3), sampled(top_p=0.5), sampled(min_p=0.3)],
    "repetition_penalty, frequency_penalty, presence_penalty": [
        *logits(repetition_penalty=1.8),
        *logits(frequency_penalty=1.5),
        *logits(presence_penalty=2),
    ],
    "logit_bias": logits(bias_token_ids=[40, 41], biases=[9, -100]),
    "allowed_token_ids": logits(allowed_token_ids=[9, 10, 11, 40, 300]),
    "bad_words": logits(bad_words=[sp.TokenRun(token_ids=[307]), sp.TokenRun(token_ids=[9, 10])]),
    "min_tokens": [
        each | {"stopping": sp.Stopping(max_new_tokens=LENGTH, stop_token_ids=list(range(300, 384)))}
        for each in logits(min_tokens=20)
    ],
    "stop token ids": [
        each | {"stopping": sp.Stopping(max_new_tokens=LENGTH, stop_token_ids=list(range(3, 384, 17)))}
        for each in ({}, SAMPLED)
    ],
    "logprobs": [each | {"logprobs": sp.LogprobsOptions(num_top=3)} for each in ({}, SAMPLED)],
    "prompt_logprobs": [{"logprobs": sp.LogprobsOptions(num_top=2, prompt=True)}],
    "JSON schema, regex, choice, grammar": [
        *grammar("json_schema", SCHEMA),
        *grammar("regex", "[a-f]{3,9}-[0-9]{2,20}"),
        *grammar("choice", ["one and a half", "two"]),
        *grammar("grammar", 'start: "x" /[yz]{5,30}/'),
    ],
    "several prompts with the same prefix": [{"prompt_token_ids": [*range(3, 200), *PROMPT], "cache_salt": b"one"}],
}
_ELSEWHERE = {
    # tests/vllm/test_gateway.py
    *("stop strings, n, best_of", "tools"),
    # tests/vllm/test_lookups.py, test_fleet.py, test_samples.py and test_faults.py
    *("a client's prediction", "receipts", "samples", "what an operator sets of a tenant", "failover"),
}


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path) -> Iterator[Loaded]:
    with loaded(tiny_vllm) as made:
        yield made


def rows() -> dict[str, str]:
    table = _PAGE.read_text().partition("| option |")[2].partition("\n\n")[0]
    found = [re.findall(r"\| (.+?) \| (.+?) \|$", line) for line in table.splitlines()[2:]]
    return {name: says for (name, says), *_ in found}


def test_the_table_has_these_rows() -> None:
    assert set(rows()) == set(CASES) | _ELSEWHERE


async def answer(engine: Loaded, changes: dict[str, Any], text: list[int] | None = None) -> Router:
    """Sequence 1; with drafts that follow `text` if it is given."""
    prompt_len = len(changes.get("prompt_token_ids", PROMPT)) if text is not None else 0

    def drafts(sequence_id: int, base_len: int) -> sp.Draft:
        assert text is not None
        done = base_len - prompt_len
        guess = [*text[done : done + 3], 9]
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=guess)

    async with served(engine, drafts) as (_, stub, draft):
        router = Router(stub)
        more: dict[str, Any] = {"stopping": sp.Stopping(max_new_tokens=LENGTH)} | changes
        more |= {"speculation": WAITING, "draft": draft.assigned(22)} if text is not None else {}
        await router.send(opens=[open_sequence(1, PROMPT, **more)])
        await router.finished(1)
    return router


def told(router: Router) -> tuple[list[float], list[float], list[list[int]]]:
    commits = [commit for response in router.responses for commit in response.commits]
    each = [one for commit in commits for one in commit.logprobs]
    prompt = [one.logprob for commit in commits for one in commit.prompt_logprobs]
    return [one.logprob for one in each], prompt, [list(one.top_token_ids) for one in each]


@pytest.mark.parametrize("name", CASES)
async def test_an_option_does_what_the_table_says(engine: Loaded, name: str) -> None:
    for changes in CASES[name]:
        alone = await answer(engine, changes)
        if (says := rows()[name]).startswith("refused"):
            assert alone.errors[1].field == re.findall("`(.+)`", says)[0]
            continue
        assert not alone.errors, alone.errors
        text = alone.text[1]
        drafted = await answer(engine, changes, text)
        assert drafted.text[1] == text and drafted.finish == alone.finish, name
        commits = [commit for response in drafted.responses for commit in response.commits]
        assert sum(commit.num_accepted for commit in commits) >= len(text) // 4
        (one, prompt, top), (other, other_prompt, other_top) = told(alone), told(drafted)
        assert one == pytest.approx(other, abs=1e-4) and prompt == pytest.approx(other_prompt, abs=1e-4)
        assert top == other_top
        half = len(text) // 2
        if half:
            moved = await answer(engine, changes | {"committed_token_ids": text[:half]})
            assert not moved.errors and moved.text[1] == text[half:], f"{name}: {changes}"


async def test_options_change_the_answer(engine: Loaded) -> None:
    plain = {True: (await answer(engine, SAMPLED)).text[1], False: (await answer(engine, {})).text[1]}
    for name in ("repetition_penalty, frequency_penalty, presence_penalty", "logit_bias", "allowed_token_ids"):
        for changes in CASES[name]:
            assert (await answer(engine, changes)).text[1] != plain["sampling" in changes], name


async def test_a_grammar_holds(engine: Loaded) -> None:
    tokenizer = tiny_tokenizer()
    for changes in grammar("regex", "[a-f]{3,9}-[0-9]{2,20}"):
        said = tokenizer.decode((await answer(engine, changes)).text[1], skip_special_tokens=True)
        assert re.fullmatch("[a-f]{3,9}-[0-9]{2,20}", said), said
    for changes in grammar("choice", ["one and a half", "two"]):
        said = tokenizer.decode((await answer(engine, changes)).text[1], skip_special_tokens=True)
        assert said in ("one and a half", "two"), said
    for changes in grammar("json_schema", {"enum": ["ab", "cd"]}):
        said = tokenizer.decode((await answer(engine, changes)).text[1], skip_special_tokens=True)
        assert json.loads(said) in ("ab", "cd"), said


async def test_logprobs_are_those_of_the_model(engine: Loaded) -> None:
    """Those of a greedy answer, against the prompt's of the same tokens."""
    asked = {"logprobs": sp.LogprobsOptions(num_top=2)}
    answered = await answer(engine, asked)
    text = answered.text[1]
    again = {"prompt_token_ids": [*PROMPT, *text], "logprobs": sp.LogprobsOptions(num_top=2, prompt=True)}
    prompt = told(await answer(engine, again))[1]
    assert told(answered)[0] == pytest.approx(prompt[len(PROMPT) - 1 :], abs=1e-3)


async def test_prefixes_are_shared_and_named_as_routers_name_them(engine: Loaded) -> None:
    size = engine.info.block_size
    prompt = [3 + n % 250 for n in range(2 * size + 5)]
    heard: list[bytes] = []
    async with served(engine) as (servicer, stub, _):
        servicer._prefix_listener = lambda added, removed: heard.extend(added)
        router = Router(stub)
        opens = [open_sequence(n, prompt, cache_salt=salt) for n, salt in ((1, b"two"), (2, b"two"), (3, b"three"))]
        cached = []
        for opening in opens:
            await router.send(opens=[opening])
            await router.finished(opening.sequence_id)
            commits = [c for r in router.responses for c in r.commits if c.sequence_id == opening.sequence_id]
            cached.append(commits[0].num_cached_tokens)
    assert cached == [0, 2 * size, 0]
    assert set(block_hashes(prompt, size, b"two")) <= set(heard)
    assert set(block_hashes(prompt, size, b"three")) <= set(heard)
