"""Target, student and measurement on a GPU: a distillation ends with a draft that has learnt something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outrider.testing.tiny import tiny_checkpoint
from outrider.training import CorpusConfig, DistillConfig, LoopConfig, run
from outrider.training.student import StudentConfig, compute_dtype


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of six layers, three of which an EAGLE-3 head reads. Its vocabulary head is not its embedding."""
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), layers=6, max_context_len=1024, tied=False)


@pytest.mark.parametrize("kind", ["model", "mtp", "eagle3", "medusa"])
def test_a_draft_learns_on_the_gpu_and_is_measured_there(
    target: Path, tmp_path: Path, gpu: torch.device, kind: str
) -> None:
    config = DistillConfig(
        out=tmp_path / "draft",
        work=tmp_path / "corpus",
        target=str(target),
        kind=kind,
        corpus=CorpusConfig(tokens=6_000, concurrency=16, max_len=200),
        student=StudentConfig(layers=(0, -1), head_tokens=300),
        training=LoopConfig(train_tokens=1, batch_tokens=1024, warmup_steps=5),
        device=gpu.type,
    )
    barely = run(config, lambda *_: None)
    longer = run(replace(config, training=replace(config.training, train_tokens=40_000)), lambda *_: None)
    assert longer.held_out_loss < 0.99 * barely.held_out_loss
    assert 0 < longer.acceptance <= 1 and 0 < longer.acceptance_sampled <= 1


def test_matrices_are_multiplied_in_bfloat16_where_the_gpu_does(gpu: torch.device) -> None:
    assert compute_dtype(gpu.type) == (torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32)
