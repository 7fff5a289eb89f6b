"""A target on vLLM without any draft worker: it looks drafts up in the text and in the client's prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.integration.target.test_server import Router, open_sequence
from tests.vllm.served import Loaded, loaded, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

OWN = sp.Speculation(max_own_draft_tokens=4)
GREEDY: dict[str, Any] = {}
COUPLED = {
    "sampling": sp.Sampling(temperature=0.8, top_p=0.95, seed=5),
    "mode": sp.VERIFICATION_MODE_COUPLED,
}
# So likely that nearly all of the text repeats itself.
REPEATING = {"logits": sp.LogitsOptions(repetition_penalty=1, bias_token_ids=[40], biases=[30])}
MODES = [pytest.param(GREEDY, id="greedy"), pytest.param(COUPLED, id="coupled")]


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path) -> Iterator[Loaded]:
    with loaded(tiny_vllm) as made:
        yield made


async def answer(engine: Loaded, **changes: Any) -> Router:
    async with served(engine) as (_, stub, _):
        router = Router(stub)
        how = {"stopping": sp.Stopping(max_new_tokens=60), "speculation": sp.Speculation()} | changes
        await router.send(opens=[open_sequence(1, [5, 6, 7], **how)])
        await router.finished(1)
    assert not router.errors, router.errors
    return router


def by_source(router: Router) -> Counter[tuple[str, bool]]:
    """Accepted tokens by source, and whether the target itself proposed them."""
    counts: Counter[tuple[str, bool]] = Counter()
    for commit in (commit for response in router.responses for commit in response.commits):
        for source in commit.sources:
            counts[source.source, source.own] += source.num_accepted
    return counts


@pytest.mark.parametrize("mode", MODES)
async def test_what_the_text_repeats_is_drafted_without_a_draft_worker(engine: Loaded, mode: dict[str, Any]) -> None:
    plain = await answer(engine, **mode, **REPEATING)
    looked_up = await answer(engine, **mode, **REPEATING, speculation=OWN)
    assert looked_up.text == plain.text and not by_source(plain)
    assert by_source(looked_up)["ngram", True] > 30
    assert len(looked_up.responses) < len(plain.responses) / 2


@pytest.mark.parametrize("mode", MODES)
async def test_a_prediction_is_used_and_changes_no_text(engine: Loaded, mode: dict[str, Any]) -> None:
    plain = await answer(engine, **mode)
    text = plain.text[1]
    for predicted, least in ((text, 40), ([each + 1 for each in text], 0)):
        found = await answer(engine, **mode, speculation=OWN, predicted_token_ids=predicted)
        assert found.text == plain.text
        assert by_source(found)["prediction", True] >= least


async def test_lookups_end_with_a_cap_of_0(engine: Loaded) -> None:
    long: dict[str, Any] = {"stopping": sp.Stopping(max_new_tokens=400), **REPEATING}
    plain = await answer(engine, **long)
    async with served(engine) as (_, stub, _):
        router = Router(stub)
        await router.send(opens=[open_sequence(1, [5, 6, 7], **long, speculation=OWN)])
        while not by_source(router)["ngram", True]:
            await router.read()
        await router.send(settings=[sp.SetSpeculation(sequence_id=1, speculation=sp.Speculation())])
        before = len(router.responses)
        await router.finished(1)
    after = [commit.num_drafted for response in router.responses[before:] for commit in response.commits]
    assert router.text == plain.text
    # What was under way when the setting was sent comes first.
    assert len(list(takewhile(lambda count: not count, reversed(after)))) > 50
