"""Recorded steps of heads, run unrecorded: what they draft, and what crosses between host and device for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from outrider.engine import CheckpointError, EngineConfig
from outrider.engine.loading.draft_checkpoint import read_embedding, read_head
from outrider.engine.run.graphs import Recorded
from outrider.heads import MedusaHead, TargetParts
from outrider.heads.engine import head_engine
from outrider.heads.layer import LayeredHead
from outrider.heads.runner import HeadRunner
from outrider.heads.text import GrowingDraft
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.speculation import SamplingParams, VerificationMode
from outrider.speculation.proposals import propose_batched
from outrider.tree import DraftTree

from tests.unit.engine.run.test_graphs import Unrecorded
from tests.unit.heads.test_engine import KINDS, LENGTHS, Read, made

pytestmark = pytest.mark.usefixtures("interpreted")

BLOCKS = 24
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=7)
RATIO = VerificationMode.RATIO
WAYS = {
    "greedy": [(GREEDY, VerificationMode.GREEDY)],
    "every mode": [(SAMPLED, RATIO), (GREEDY, RATIO), (SAMPLED, VerificationMode.COUPLED)],
}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the interpreter is slow."""
    for module in ("engine", "recorded"):
        monkeypatch.setattr(f"outrider.heads.{module}.ROWS", (4,))


class Lazy(Unrecorded):
    """Runs nothing before it is replayed."""

    def record(self, run: Callable[[], None]) -> Recorded:
        return SimpleNamespace(replay=run)


def runner(head: LayeredHead, recorder: Unrecorded | None = None) -> HeadRunner:
    config = EngineConfig(
        dtype="float32", attention="triton", execution="transformers", num_blocks=BLOCKS + 1, prefix_cache=False
    )
    engine = head_engine(head, config, 64)
    assert engine is not None and engine.info.execution == "fused-cuda"
    # The last block is the scratch block here.
    engine.kv._pool.allocate(BLOCKS + 1)
    engine.kv._pool.release(list(range(BLOCKS)))
    if recorder is not None:
        engine.record(head, recorder, BLOCKS * config.block_size)
    return HeadRunner(head, engine)


@torch.inference_mode()
def drafted(its: HeadRunner, way: str, counts: list[int], device: str = "cpu") -> list[DraftTree]:
    """Two proposals for each text. Between them all have been given three tokens more."""
    torch.manual_seed(1)
    ids = [torch.randint(3, 259, (length + 4,)).tolist() for length in LENGTHS]
    features = [torch.randn(length + 3, 64).to(device) for length in LENGTHS]
    tokens, found = [own[: length + 1] for own, length in zip(ids, LENGTHS, strict=True)], []
    texts = []
    for number, own in enumerate(tokens):
        params, mode = WAYS[way][number % len(WAYS[way])]
        texts.append(its.open(SequenceSpec(tuple(own), params, mode, 32, speculation=Speculation(5)), own))
    for first in (True, False):
        for text, own, all_of_it, its_features in zip(texts, tokens, ids, features, strict=True):
            start = 0 if first else len(own) - 1
            own[:] = own if first else all_of_it
            its.see(text, start, its_features[start : len(own) - 1])
        its.read(texts)
        assert all(text.ready for text in texts)
        found += its.draft(texts, counts)
    return found


@pytest.mark.parametrize("way", ["greedy", pytest.param("every mode", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [kind if kind == "mtp" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_draft_of_recorded_steps_is_that_of_steps_one_by_one(
    tiny: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tuning.HEAD_MIN_JOINT", 1e-9)
    monkeypatch.setattr("outrider.heads.runner.propose", propose_batched)
    counts = [3, 1, 2]
    want = drafted(runner(made(kind, tiny)), way, counts)
    found = drafted(runner(made(kind, tiny), Lazy()), way, counts)
    assert any(len(tree.token_ids) > 2 for tree in want)
    for now, before in zip(found, want, strict=True):
        assert now.token_ids == before.token_ids and now.parents == before.parents
        assert now.chances == pytest.approx(before.chances, rel=1e-3)
        assert [q.token_ids for q in now.q] == [q.token_ids for q in before.q]


def test_a_head_whose_steps_cannot_be_recorded_says_which_option_to_turn_off(tiny: Path) -> None:
    class Synchronising(Unrecorded):
        def record(self, run: Callable[[], None]) -> Recorded:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(CheckpointError, match=r"cuda_graphs: .* turn it off: operation not permitted"):
        runner(made("mtp", tiny), recorder=Synchronising())


@pytest.mark.parametrize(
    "kind", [kind if kind == "eagle3" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_kernels_of_a_gpu_say_of_each_text_what_the_head_says_alone(tiny: Path, kind: str) -> None:
    head, texts = made(kind, tiny), Read.some()
    wanted, engine = torch.stack(texts.alone(head)), runner(head)._engine
    assert engine is not None
    torch.testing.assert_close(torch.stack(texts.on(engine)), wanted, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_what_a_head_tells_at_once_is_what_it_tells_token_by_token(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.tuning.HEAD_MIN_JOINT", 1e-9)
    torch.manual_seed(0)
    head = MedusaHead(TargetParts(read_embedding(tiny).float(), read_head(tiny).float(), 2), 3).eval()
    its, texts = HeadRunner(head, None), []
    for params, mode in WAYS["every mode"]:
        tokens = [*range(5, 12)]
        texts.append(its.open(SequenceSpec(tuple(tokens), params, mode, 32), tokens))
        its.see(texts[-1], 0, torch.randn(6, 64))
    its.read(texts)
    want = its.draft(texts, [3, 3, 3])
    found = its._ahead(texts, [GrowingDraft.of(text, 0.0) for text in texts])
    for text, tree, proposals in zip(texts, want, found, strict=True):
        draft = GrowingDraft.of(text, 0.0)
        for proposal in proposals:
            draft.add(proposal)
        assert draft.tree(head.kind) == tree and len(tree.token_ids) > 2
