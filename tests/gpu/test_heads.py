"""Heads draft in recorded steps what they draft step by step, with one copy there and one back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from outrider.engine import EngineConfig
from outrider.heads.engine import head_engine
from outrider.heads.runner import HeadRunner
from outrider.sequence.spec import SequenceSpec
from outrider.speculation import VerificationMode
from outrider.testing.tiny import tiny_checkpoint

from tests.gpu.test_engine import GREEDY, copies
from tests.unit.heads.test_engine import KINDS, made
from tests.unit.heads.test_recorded import WAYS, drafted


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def runner(kind: str, checkpoint: Path, dtype: torch.dtype, *, graphs: bool = True) -> HeadRunner:
    head = made(kind, checkpoint).to("cuda", dtype)
    config = EngineConfig(device="cuda", num_blocks=64, prefix_cache=False, cuda_graphs=graphs)
    return HeadRunner(head, head_engine(head, config, 256))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_recorded_steps_is_that_of_steps_one_by_one(
    gpu: torch.device, checkpoint: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tuning.HEAD_MIN_JOINT", 1e-9)
    both = [runner(kind, checkpoint, torch.bfloat16, graphs=graphs) for graphs in (True, False)]
    found, want = (drafted(its, way, [5, 1, 3], "cuda") for its in both)
    for now, before in zip(found, want, strict=True):
        assert (now.token_ids, now.parents, now.q) == (before.token_ids, before.parents, before.q)
        assert now.chances == pytest.approx(before.chances, rel=1e-3)


@torch.inference_mode()
def test_a_proposal_is_one_copy_there_and_one_back(gpu: torch.device, checkpoint: Path) -> None:
    its, tokens = runner("mtp", checkpoint, torch.bfloat16), [*range(5, 30)]
    texts = [its.open(SequenceSpec(tuple(tokens), GREEDY, VerificationMode.GREEDY, 32), tokens) for _ in range(3)]
    for text in texts:
        its.see(text, 0, torch.randn(24, 64, device=gpu))
    its.read(texts)
    assert copies(lambda: its.draft(texts, [4, 4, 4])) == {"HtoD": 1, "DtoH": 1}
