"""A model that does not fit is refused before it is loaded, with the sum shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outrider.engine import CheckpointError, EngineConfig
from outrider.engine.attention import Shape
from outrider.engine.attention.paged import Workspace
from outrider.engine.loading.assembly import working_bytes
from outrider.engine.loading.loader import load_engine
from outrider.engine.models import memory
from outrider.engine.models.memory import DoesNotFit, Need, count_parameters, held_bytes, kv_blocks
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

GB = 10**9
BIG = Need("llama-70b", 70 * GB, 2, "float16", block_bytes=5 * 2**20, context_blocks=512)


def test_seventy_billion_parameters_do_not_fit_into_eighty_gigabytes() -> None:
    with pytest.raises(DoesNotFit, match=r"llama-70b: needs 140\.0 GB: 70\.0 B parameters in float16 are 140\.0 GB"):
        kv_blocks(BIG, 80 * GB, "cuda", blocks=None, kv_bytes=None)


def test_a_gpu_gives_the_kv_cache_most_of_what_the_weights_leave() -> None:
    blocks = kv_blocks(BIG, 180 * GB, "cuda", blocks=None, kv_bytes=None)
    assert 0.85 < blocks * BIG.block_bytes / (180 * GB * 0.95 - BIG.weight_bytes) <= 0.9


def test_on_a_cpu_the_default_is_modest() -> None:
    small = Need("small", 10**8, 2, "bfloat16", block_bytes=360_000, context_blocks=128)
    blocks = kv_blocks(small, 20 * GB, "cpu", blocks=None, kv_bytes=None)
    assert blocks == min(8 * 128, 2**30 // 360_000)
    assert kv_blocks(small, GB // 2, "cpu", blocks=None, kv_bytes=None) * 360_000 < GB // 4


def test_what_is_asked_for_is_given_or_refused() -> None:
    assert kv_blocks(BIG, 200 * GB, "cuda", blocks=7, kv_bytes=None) == 7
    assert kv_blocks(BIG, 200 * GB, "cuda", blocks=None, kv_bytes=11 * 2**20) == 2
    with pytest.raises(DoesNotFit, match=r"KV cache is 60\.0 GB"):
        kv_blocks(BIG, 200 * GB, "cuda", blocks=None, kv_bytes=60 * GB)
    with pytest.raises(CheckpointError, match="kv_cache_bytes"):
        kv_blocks(BIG, 200 * GB, "cuda", blocks=None, kv_bytes=100)


def test_parameters_are_counted_without_loading_them(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    # The tied head is stored once.
    assert count_parameters(tiny) == sum(p.numel() for p in model.parameters())


def test_a_full_machine_refuses_at_start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.loading.loader.available_bytes", lambda device: 10_000)
    with pytest.raises(DoesNotFit, match=r"this device has 0\.0 MB free"):
        load_engine(tiny, EngineConfig(dtype="float32"))
    assert memory.available_bytes("cpu") > 10**8


def test_what_a_model_holds_is_its_own_tensors_and_not_those_of_a_library_it_uses() -> None:
    model = nn.Linear(4, 3)
    model.functions = torch.distributed
    assert held_bytes(model) == (4 * 3 + 3) * 4


def test_what_steps_take_on_a_gpu_is_left_to_them() -> None:
    available = 80 * GB
    need = Need("llama-8b", 8 * GB, 2, "bfloat16", block_bytes=2 * 2**20, context_blocks=512)
    blocks, fewer = (
        kv_blocks(each, available, "cuda", blocks=None, kv_bytes=None)
        for each in (need, replace(need, working_bytes=10 * GB))
    )
    assert (blocks - fewer) * need.block_bytes == pytest.approx(0.9 * 10 * GB, abs=need.block_bytes)
    with pytest.raises(DoesNotFit, match=r"steps take 70\.0 GB"):
        kv_blocks(replace(need, working_bytes=70 * GB), available, "cuda", blocks=None, kv_bytes=None)


def test_a_workspace_takes_what_is_planned_for_it() -> None:
    shape = Shape(heads=14, kv_heads=2, head_dim=96, block_size=16)
    workspace = Workspace.allocate(shape, 40, torch.empty(0, dtype=torch.bfloat16))
    assert held_bytes(workspace) == Workspace.num_bytes(shape, 40, itemsize=2)
    settings = LlamaConfig(
        vocab_size=1000, hidden_size=1344, num_attention_heads=14, num_key_value_heads=2, head_dim=96
    )
    config = EngineConfig(device="cuda", max_batch_tokens=40)
    assert working_bytes(settings, config) > 2 * (held_bytes(workspace) + 40 * 1000 * 4)
    assert working_bytes(settings, EngineConfig()) == 0


def test_a_model_that_leaves_no_memory_for_what_a_process_takes_beside_it_does_not_fit(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 64 << 20
    monkeypatch.setattr("outrider.engine.loading.loader.available_bytes", lambda device: free)
    assert load_engine(tiny, EngineConfig(dtype="float32", num_blocks=4), host_bytes=free // 2)
    with pytest.raises(DoesNotFit):
        load_engine(tiny, EngineConfig(dtype="float32", num_blocks=4), host_bytes=free)
