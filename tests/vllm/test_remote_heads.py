"""A head on a draft worker beside a target on vLLM: texts are the target's whatever becomes of the worker, and what it
proposes is what the head does beside transformers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.draft.config import DraftConfig
from outrider.draft.process import describe
from outrider.draft.process import serve as serve_draft
from outrider.drafters.head import HeadDrafter
from outrider.drafters.sequence import DraftSequence
from outrider.drafting.source import Features
from outrider.engine import EngineConfig
from outrider.engine.loading.draft_checkpoint import read_embedding, read_head
from outrider.heads.loading import load_head_of
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import target_pb2, worker_pb2
from outrider.testing.tiny import tiny_checkpoint
from outrider.training.head_student import HeadLearner
from outrider.training.student import StudentConfig
from outrider.tree import DraftTree
from outrider.worker.process import RunningWorker

from tests.integration.target.test_server import Router, open_sequence
from tests.unit.drafters.whole_text import TIE, WholeText
from tests.unit.heads.dflash_formula import Formula
from tests.vllm.served import Loaded, loaded, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LAYERS, COUNT, LENGTH = 6, 40, 32
KINDS = ["mtp", "eagle3", "dflash"]


@pytest.fixture(scope="module", autouse=True)
def deep_drafts() -> Iterator[None]:
    # So little does a random head know that its drafts would end at once.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.tuning.HEAD_MIN_JOINT", 0.0)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", head_dim=32, layers=LAYERS)


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    if request.param == "dflash":
        return Formula.random(read_embedding(model).float(), read_head(model).float()).write(made)
    learner = HeadLearner(request.param, model, StudentConfig(), None, "cpu", None)
    for module in learner.module.modules():
        # What a head begins as reads no states, or multiplies what rounding changed in them.
        if isinstance(module, torch.nn.Linear):
            module.reset_parameters()
    learner.save(made, str(model), {})
    return made


@pytest.fixture(scope="module")
def engine(model: Path, head: Path) -> Iterator[Loaded]:
    # Prompts come in chunks, and not all have room at once.
    engine = {"num_blocks": 60, "max_batch_tokens": 96}
    args = "--kv-cache-memory-bytes=200000000 --async-scheduling --block-size=32 --max-model-len=256"
    with loaded(model, args, engine=engine, remote_head=str(head)) as made:
        yield made


class Recording(HeadDrafter):
    """Keeps what it proposes, by prompt and length. May have a fault."""

    fault = ""
    proposed: dict[tuple[tuple[int, ...], int], DraftTree]

    def see(self, sequence: DraftSequence, features: Features) -> bool:
        if self.fault == "nothing is heard of it":
            return False
        if self.fault == "wrong features":
            features = replace(features, rows=features.rows[::-1])
            # Of numbers that no model has, the sequence's draft would end.
            rows = torch.frombuffer(bytearray(features.rows), dtype=torch.uint8) & 0x3F
            features = replace(features, rows=rows.numpy().tobytes())
        return super().see(sequence, features)

    def propose(self, sequences: Sequence[DraftSequence]) -> list[DraftTree | None]:
        if self.fault == "late":
            time.sleep(0.5)
        trees = super().propose(sequences)
        for sequence, tree in zip(sequences, trees, strict=True):
            if tree is not None and tree.token_ids:
                self.proposed[tuple(sequence.spec.prompt), len(sequence.tokens)] = tree
        return trees


@dataclass(frozen=True)
class Pool:
    """Two draft workers that hold the head."""

    drafters: Sequence[Recording]
    workers: Sequence[RunningWorker[Any]]
    infos: Sequence[worker_pb2.WorkerInfo]

    def assigned(self, sequence_id: int, worker: int = 0) -> sp.DraftAssignment:
        address = self.workers[worker].life.address
        return sp.DraftAssignment(worker_id=self.infos[worker].worker_id, address=address, sequence_id=sequence_id)


@contextlib.asynccontextmanager
async def pool_of(model: Path, head: Path) -> AsyncIterator[Pool]:
    config = DraftConfig(model=str(model), listen="127.0.0.1:0", head=str(head))
    async with contextlib.AsyncExitStack() as stack:
        drafters, workers, infos = [], [], []
        for _ in range(2):
            drafter: Any = Recording.load(head, model, EngineConfig(dtype="float32", execution="transformers"))
            drafter.proposed = {}
            info = describe(config, model, drafter)
            workers.append(await stack.enter_async_context(serve_draft(config, drafter, info)))
            drafters.append(drafter)
            infos.append(info)
        yield Pool(drafters, workers, infos)


@contextlib.asynccontextmanager
async def served(engine: Loaded, model: Path, head: Path) -> AsyncIterator[tuple[Any, Pool]]:
    async with pool_of(model, head) as pool, running(engine) as (worker, stub):
        held = zip(pool.infos, pool.workers, strict=True)
        records = [LeaseRecord(info, worker_pb2.WorkerLoad(), one.life.address, 1) for info, one in held]

        async def leases() -> list[LeaseRecord]:
            return records

        worker.servicer.drafts.links._leases.read = leases
        yield stub, pool


def prompt_of(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 259) for _ in range(rng.randint(20, 120))]


NUMBERS = range(1, COUNT + 1)


async def texts(stub: Any, pool: Pool | None = None, committed: dict[int, list[int]] | None = None) -> Router:
    """Forty texts are asked for; without `pool` nothing drafts."""
    router = Router(stub)
    opens = [
        open_sequence(
            number,
            prompt_of(number),
            committed_token_ids=committed[number] if committed else (),
            stopping=sp.Stopping(max_new_tokens=LENGTH),
            speculation=sp.Speculation(max_draft_tokens=4 if pool else 0),
            **({"draft": pool.assigned(number)} if pool else {}),
        )
        for number in NUMBERS
    ]
    await router.send(opens=opens)
    return router


@pytest.fixture(scope="module")
def plain(engine: Loaded) -> dict[int, list[int]]:
    """The texts without drafts."""

    async def asked() -> dict[int, list[int]]:
        async with running(engine) as (_, stub):
            router = await texts(stub)
            await router.finished(*NUMBERS)
            assert not router.errors and {len(text) for text in router.text.values()} == {LENGTH}
            return dict(router.text)

    return asyncio.run(asked())


async def disturb(router: Router, pool: Pool) -> None:
    """The first draft worker is gone when most answers have begun; the router names the other."""
    while sum(len(text) > 4 for text in router.text.values()) < COUNT // 2:
        await router.read()
    await pool.workers[0].life.server.stop(0)
    moved = [number for number in NUMBERS if number not in router.finish]
    changes = [target_pb2.SetDraft(sequence_id=number, draft=pool.assigned(number + 100, 1)) for number in moved]
    await router.send(set_drafts=changes)


PLANTED = ["nothing is heard of it", "wrong features"]


@pytest.mark.parametrize("how", ["alone", "late", "killed", "the target is restarted", *PLANTED])
async def test_forty_texts_are_the_target_s_and_proposals_those_of_the_head_beside_transformers(
    engine: Loaded, model: Path, head: Path, plain: dict[int, list[int]], how: str
) -> None:
    """In chunks, after hits in the prefix cache and preemptions; and each planted fault is seen in the proposals."""
    preempted, restarted = engine.scheduler.num_preemptions, how == "the target is restarted"
    begun = {number: text[: number % 20 if restarted else 0] for number, text in plain.items()}
    async with served(engine, model, head) as (stub, pool):
        pool.drafters[0].fault = how
        router = await texts(stub, pool, begun)
        if how == "killed":
            await disturb(router, pool)
        await router.finished(*NUMBERS)
    assert not router.errors and engine.scheduler.num_preemptions > preempted
    assert {number: begun[number] + text for number, text in router.text.items()} == plain
    beside, gaps = WholeText(model, load_head_of(model, head, "cpu")[0]), [0.0]
    for drafter in pool.drafters:
        for number in NUMBERS[:20]:
            prompt = prompt_of(number)
            made = {at: tree for (of, at), tree in drafter.proposed.items() if of == tuple(prompt)}
            gaps.append(beside.gap([*prompt, *plain[number]], made))
    proposed = [len(drafter.proposed) for drafter in pool.drafters]
    assert (max(gaps) > TIE) is (how == "wrong features")
    assert (proposed[0] > COUNT) is (how != "nothing is heard of it")
    assert (proposed[1] > COUNT) is (how == "killed")
