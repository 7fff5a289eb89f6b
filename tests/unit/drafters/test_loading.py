"""Drafters from checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider.draft.config import DraftConfig
from outrider.draft.process import describe, load
from outrider.drafters import load_drafter
from outrider.engine import CheckpointError, EngineConfig, weights_revision
from outrider.heads import HeadFeatures
from outrider.protocol.pairs import compatibility_problem
from outrider.sequence.spec import SequenceSpec
from outrider.target.config import TargetConfig
from outrider.target.process import _head
from outrider.target.process import load as load_target
from outrider.training.head_student import HeadLearner
from outrider.training.student import StudentConfig
from safetensors.torch import save_file


def test_a_checkpoint_is_a_drafter_with_its_limits(tiny: Path, greedy: Callable[..., SequenceSpec]) -> None:
    drafter = load_drafter(tiny, engine=EngineConfig(dtype="float32", num_blocks=16))
    assert (drafter.info.vocab_size, drafter.info.max_context_len) == (384, 512)
    [drafted] = drafter.draft([drafter.open(greedy([20, 21, 22, 23, 24, 20, 21, 22]))])
    assert drafted is not None


def test_a_head_is_loaded_for_its_target_or_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    HeadLearner("medusa", tiny, StudentConfig(), None, "cpu", None).save(tmp_path, str(tiny), {})
    drafter = load_drafter(tiny, head=tmp_path)
    assert (drafter.info.vocab_size, drafter.info.max_context_len) == (384, 512)
    with pytest.raises(CheckpointError, match="head: "):
        load_drafter(tiny, head=tiny)


def test_a_head_s_directory_needs_no_tokenizer_to_be_started_with(tiny: Path, tmp_path: Path) -> None:
    head, other = tmp_path / "head", tmp_path / "other"
    HeadLearner("medusa", tiny, StudentConfig(), None, "cpu", None).save(head, str(tiny), {})
    config = DraftConfig(listen="127.0.0.1:0", model=str(tiny), head=str(head))
    info = describe(config, tiny, load(config, tiny))
    assert (info.draft_kind, info.features, info.vocab_size) == ("head", weights_revision(head), 384)
    target = TargetConfig(
        listen="127.0.0.1:0",
        model=str(tiny),
        remote_head=str(head),
        engine=EngineConfig(dtype="float32", num_blocks=64),
    )
    engine, its_info = load_target(target)
    assert its_info.features == info.features and compatibility_problem(its_info, info) is None
    assert isinstance(_head(target, engine)[0], HeadFeatures)
    other.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tiny / name, other)
    speaking = DraftConfig(
        listen="127.0.0.1:0",
        model=str(tiny),
        target_model=str(other),
        engine=EngineConfig(dtype="float32", num_blocks=64),
    )
    assert describe(speaking, tiny, load(speaking, tiny)).draft_kind == "model"


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]},
        {"model_type": "gpt_oss", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
    ],
)
def test_a_head_drafts_for_a_target_that_only_vllm_runs(fields: dict[str, Any], tmp_path: Path) -> None:
    """Of the target its embedding, vocabulary head and number of positions are read."""
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 96, "max_position_embeddings": 512}
    for name, config, tensors in (
        ("model", {**shape, **fields}, {"model.embed_tokens.weight": torch.ones(96, 64)}),
        ("head", {"model_type": "medusa"}, {"blocks.0.layers.0.weight": torch.zeros(64, 64)}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert load_drafter(tmp_path / "model", head=tmp_path / "head").info.max_context_len == 512
