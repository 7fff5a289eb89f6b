"""What a target on vLLM sends to a head on draft workers is what the head reads of transformers' states of the text."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.drafting.source import Features
from outrider.engine.loading.draft_checkpoint import read_embedding, read_head
from outrider.heads.interface import DraftHead
from outrider.heads.loading import load_head_of
from outrider.heads.remote import read
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.testing.tiny import tiny_checkpoint
from outrider.training.head_student import HeadLearner
from outrider.training.student import StudentConfig
from transformers import AutoModelForCausalLM

from tests.integration.target.test_server import Router, ScriptedDraft, open_sequence
from tests.unit.heads.dflash_formula import Formula
from tests.vllm.served import Loaded, loaded, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYERS, COUNT, LENGTH = 6, 8, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", head_dim=32, layers=LAYERS)


@pytest.fixture(scope="module", params=["mtp", "eagle3", "dflash"])
def head(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    if request.param == "dflash":
        return Formula.random(read_embedding(model).float(), read_head(model).float()).write(made)
    HeadLearner(request.param, model, StudentConfig(), None, "cpu", None).save(made, str(model), {})
    return made


WAYS = {"alone": ("--no-async-scheduling", 1), "ahead": ("--async-scheduling", 1), "divided": ("--async-scheduling", 2)}


@pytest.fixture(scope="module", params=WAYS)
def engine(request: pytest.FixtureRequest, model: Path, head: Path) -> Iterator[Loaded]:
    # Prompts come in chunks, and not all have room at once.
    engine, (steps, ranks) = {"num_blocks": 26, "max_batch_tokens": 64}, WAYS[request.param]
    args = f"--kv-cache-memory-bytes=200000000 {steps} --block-size=32 --max-model-len=256"
    with loaded(model, args, engine=engine, remote_head=str(head), tensor_parallel=ranks) as made:
        yield made


def prompt_of(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 259) for _ in range(rng.randint(60, 150))]


class Transformers:
    def __init__(self, model: Path, head: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.head: DraftHead = load_head_of(model, head, "cpu")[0]

    @torch.inference_mode()
    def features(self, tokens: Sequence[int]) -> torch.Tensor:
        states = self._model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        taps = self.head.taps or (LAYERS,)
        return self.head.features(torch.cat([states[tap] for tap in taps], -1))[0]


def received(draft: ScriptedDraft, width: int) -> dict[int, dict[int, torch.Tensor]]:
    """By sequence and position. None comes twice, but once all from the first: with the step after that in which the
    draft was found."""
    found: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    began = Counter[int]()
    for commit in [commit for request in draft.requests for commit in request.commits if commit.features]:
        rows = read(Features(commit.features_start, commit.features), width)
        if not commit.features_start:
            began[commit.sequence_id] += 1
            before = found.pop(commit.sequence_id, {})
            assert len(before) <= len(rows) and all(torch.equal(row, rows[at]) for at, row in before.items())
        for position, row in enumerate(rows, commit.features_start):
            assert position not in found[commit.sequence_id]
            found[commit.sequence_id][position] = row
    assert max(began.values()) <= 2
    return found


async def test_each_position_is_sent_once_and_as_transformers_has_it(engine: Loaded, model: Path, head: Path) -> None:
    """With drafts and without, in chunks, after preemptions and after hits in the prefix cache; and of a model that is
    divided among two processes, of which the first sends."""
    rng, wanted, theirs = random.Random(1), dict[int, list[int]](), Transformers(model, head)

    def drafts(sequence_id: int, base_len: int) -> sp.Draft:
        number = sequence_id % 100
        done = base_len - len(prompt_of(number))
        text = wanted.get(number, [])[done : done + 4] if done >= 0 else []
        guess = [token if rng.random() < 0.8 else rng.randrange(384) for token in text]
        return sp.Draft(sequence_id=sequence_id, base_len=base_len, token_ids=guess)

    numbers, preempted = range(1, COUNT + 1), engine.scheduler.num_preemptions
    async with served(engine, drafts) as (_, stub, draft):
        for round_ in range(3):
            router = Router(stub)
            opens: list[Any] = [
                open_sequence(
                    number,
                    prompt_of(number),
                    stopping=sp.Stopping(max_new_tokens=LENGTH),
                    speculation=sp.Speculation(max_draft_tokens=4),
                    draft=draft.assigned(number + 100 * round_),
                )
                for number in numbers
            ]
            await router.send(opens=opens)
            await router.finished(*numbers)
            assert not router.errors
            wanted = wanted or dict(router.text)
            assert router.text == wanted
        assert engine.scheduler.num_preemptions > preempted
        width = theirs.features([5]).shape[-1]
        found = received(draft, width)
    assert len(found) == 3 * COUNT
    for name, rows in found.items():
        text = [*prompt_of(name % 100), *wanted[name % 100]]
        expected = theirs.features(text)
        # Of the last step's tokens nothing is proposed any more.
        assert [*rows] == [*range(len(rows))] and len(rows) >= len(text) - 6
        ours = torch.stack([*rows.values()]).float()
        torch.testing.assert_close(ours, expected[: len(rows)], rtol=2**-7, atol=1e-3)
