"""The native kernels give transformers' logits, for every shape they accept, and refuse the others."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest
import torch
from outrider.engine import Engine, EngineConfig, Row
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.checkpoints.quantization import quantize
from outrider.engine.loading.draft_checkpoint import load_draft_model, save_draft_model
from outrider.engine.loading.loader import load_engine
from outrider.testing.tiny import tiny_checkpoint
from outrider.training.student import StudentConfig, build_student
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.usefixtures("variant")


def checkpoint(directory: Path, **shape: int) -> Path:
    """A tiny model of another shape: the tiny checkpoint's files, with this model's weights and config."""
    path = tiny_checkpoint(directory)
    torch.manual_seed(1)
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, **shape}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=389, num_hidden_layers=2, max_position_embeddings=512, **settings))
    for weight in model.parameters():
        weight.data.mul_(4 if weight.ndim > 1 else 1)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


class Load(Protocol):
    def __call__(self, path: Path, execution: str = ..., quantization: str = ..., **changes: int) -> Engine: ...


@pytest.fixture
def load(variant: str) -> Load:
    def load(path: Path, execution: str = "native", quantization: str = "none", **changes: int) -> Engine:
        settings = {"native_variant": variant, "num_blocks": 64, **changes}
        return load_engine(path, EngineConfig(execution=execution, quantization=quantization, **settings))

    return load


def tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(3, 300) for i in range(count)]


def reference(path: Path, token_ids: list[int]) -> Tensor:
    """[tokens, vocab], in float32 from the same bfloat16 weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(torch.float32)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"hidden_size": 96, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 1},
        {"head_dim": 48, "num_key_value_heads": 4},
        {"head_dim": 64, "hidden_size": 80},
        {"head_dim": 80},
        {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 416},
        {"head_dim": 256, "num_attention_heads": 2},
    ],
    ids=str,
)
def test_logits_are_those_of_transformers_up_to_rounding(tmp_path: Path, load: Load, shape: dict[str, int]) -> None:
    path = checkpoint(tmp_path, **shape)
    engine, prompt = load(path), tokens(150)
    sequence = engine.kv.open([])
    got = [engine.forward([Row(sequence, part, len(part))]) for part in (prompt[:90], prompt[90:97], prompt[97:])]
    want = reference(path, prompt)
    # bfloat16 keeps 8 bits; what transformers itself loses in bfloat16 is the measure.
    theirs = load(path, "transformers")
    rounded = theirs.forward([Row(theirs.kv.open([]), prompt, len(prompt))])
    assert error(torch.cat(got), want) < 1.2 * error(rounded, want)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("shape", [{}, {"head_dim": 64, "hidden_size": 80}, {"head_dim": 80}], ids=str)
def test_quantized_weights_are_multiplied_as_they_are(
    tmp_path: Path, load: Load, shape: dict[str, int], quantization: str
) -> None:
    path = checkpoint(tmp_path, **shape)
    engine, prompt = load(path, quantization=quantization), tokens(150)
    sequence = engine.kv.open([])
    # Parts of one strip, of two, and of so many that a panel is widened once for all.
    got = [engine.forward([Row(sequence, part, len(part))]) for part in (prompt[:120], prompt[120:131], prompt[131:])]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    quantize(model, quantization)
    with torch.inference_mode():
        want: Tensor = model.to(torch.float32)(torch.tensor([prompt])).logits[0]
    theirs = load(path, "transformers", quantization=quantization)
    rounded = theirs.forward([Row(theirs.kv.open([]), prompt, len(prompt))])
    # Inputs of int4 are rounded to 8 bits.
    assert error(torch.cat(got), want) < (2 if quantization == "int4" else 1.2) * error(rounded, want)
    assert error(torch.cat(got), want) < 0.5 * error(reference(path, prompt), want)


def test_a_shipped_draft_runs_by_its_int8_weights(tmp_path: Path, load: Load) -> None:
    target = checkpoint(tmp_path / "target")
    token_map = torch.arange(0, 389, 2)
    model = build_student(target, StudentConfig(layers=(0, 1), head_tokens=len(token_map)), token_map)
    draft = tmp_path / "draft"
    save_draft_model(draft, model, token_map, base=str(target), recipe={})
    prompt = tokens(40)
    engine, plain = load(draft), load(draft, "transformers")
    got, want = (e.forward([Row(e.kv.open([]), prompt, 40)]).clone() for e in (engine, plain))
    assert got.shape == (40, len(token_map))
    assert error(got, want) < 0.03
    # Inputs are rounded as well, row by row: still the same bits in any shape of a step.
    for size in (1, 5, 6, 7, 13):
        sequence = engine.kv.open([])
        parts = [
            engine.forward([Row(sequence, prompt[i : i + size], len(prompt[i : i + size]))]) for i in range(0, 40, size)
        ]
        assert torch.equal(torch.cat([part.clone() for part in parts]), got), size
    kept, _ = load_draft_model(draft, torch.bfloat16, in_int8=True)
    weight = kept.model.layers[1].mlp.down_proj.weight
    assert torch.equal(weight, load_file(draft / "draft.safetensors")["layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    tmp_path: Path, load: Load, quantization: str, head_dim: int
) -> None:
    path, prompt = checkpoint(tmp_path, head_dim=head_dim), tokens(60)
    engine = load(path, quantization=quantization, prefix_cache=False)
    whole = engine.forward([Row(engine.kv.open([]), prompt, 60)]).clone()
    for size in (1, 5, 7, 11, 13):
        sequence = engine.kv.open([])
        parts = [prompt[start : start + size] for start in range(0, 60, size)]
        got = torch.cat([engine.forward([Row(sequence, part, len(part))]).clone() for part in parts])
        assert torch.equal(got, whole), size


@pytest.mark.parametrize("block_size", [16, 48])
def test_ragged_rows_in_scattered_blocks_do_not_see_one_another(tmp_path: Path, load: Load, block_size: int) -> None:
    path = checkpoint(tmp_path)
    engine = load(path, block_size=block_size, prefix_cache=False)
    alone = load(path, prefix_cache=False)
    prompts = [tokens(n, seed=n) for n in (3, 130, 65, 17, 64)]
    sequences = [engine.kv.open(p) for p in prompts]
    want = torch.cat([alone.forward([Row(alone.kv.open(p), p, 2)]) for p in prompts])
    for start in range(0, 130, 7):  # in turns, so that their blocks lie among one another
        rows = [
            Row(s, p[start : start + 7], 0) for s, p in zip(sequences, prompts, strict=True) if p[start : start + 7]
        ]
        engine.forward(rows)
    for s, p in zip(sequences, prompts, strict=True):
        engine.kv.rewind(s, len(p) - 2)
    got = engine.forward([Row(s, p[-2:], 2) for s, p in zip(sequences, prompts, strict=True)])
    assert torch.equal(got, want)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_threads_do_not_show(tmp_path: Path, load: Load, quantization: str) -> None:
    engine, prompt = load(checkpoint(tmp_path), quantization=quantization, prefix_cache=False), tokens(200)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = engine.forward([Row(engine.kv.open([]), prompt, 200)])
        torch.set_num_threads(3)
        three = engine.forward([Row(engine.kv.open([]), prompt, 200)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, three)


def test_engines_that_step_at_the_same_time_share_the_helpers(tmp_path: Path, load: Load) -> None:
    path, prompts = checkpoint(tmp_path), [tokens(40 + 60 * i) for i in range(4)]
    alone = load(path, prefix_cache=False)
    want = [alone.forward([Row(alone.kv.open([]), p, len(p))]) for p in prompts]
    engines = [load(path, prefix_cache=False, prefill_threads=3) for _ in prompts]

    def steps(engine: Engine, prompt: list[int]) -> list[torch.Tensor]:
        sequence, got = engine.kv.open([]), []
        for _ in range(30):
            got.append(engine.forward([Row(sequence, prompt, len(prompt))]))
            engine.kv.rewind(sequence, 0)
        return got

    with ThreadPoolExecutor(len(prompts)) as threads:
        got = list(threads.map(steps, engines, prompts))
    for mine, right in zip(got, want, strict=True):
        assert all(torch.equal(one, right) for one in mine)


def test_what_an_earlier_sequence_left_in_the_cache_is_not_seen(tmp_path: Path, load: Load) -> None:
    engine, prompt = load(checkpoint(tmp_path), prefix_cache=False), tokens(20)
    fresh = engine.forward([Row(engine.kv.open([]), prompt, 20)])
    for sequence in (engine.kv.open([]) for _ in range(3)):
        engine.forward([Row(sequence, tokens(300, seed=5), 0)])
        engine.kv.close(sequence)
    assert torch.equal(engine.forward([Row(engine.kv.open([]), prompt, 20)]), fresh)


def with_a_poisoned_token(path: Path, token: int) -> Path:
    """The embedding of `token` is infinite: whatever looks at it is no number."""
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("inf")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_no_number_in_the_cache_reaches_only_those_that_see_it(tmp_path: Path, load: Load, head_dim: int) -> None:
    poison = 350
    path = with_a_poisoned_token(checkpoint(tmp_path, head_dim=head_dim), poison)
    engine, prompt = load(path, prefix_cache=False), tokens(90)
    want = engine.forward([Row(engine.kv.open([]), prompt, 90)]).clone()
    # Every block has been spoiled by another sequence before it is used again.
    spoiling = [engine.kv.open([]) for _ in range(2)]
    engine.forward([Row(sequence, [poison] * 464, 0) for sequence in spoiling])
    for sequence in spoiling:
        engine.kv.close(sequence)
    for size in (1, 3, 7, 90):
        sequence = engine.kv.open([])
        for start in range(0, 90, size):
            part = prompt[start : start + size]
            # Guesses that follow, and are taken back.
            got = engine.forward([Row(sequence, [*part, poison, 5, poison], len(part) + 3)])
            assert torch.equal(got[: len(part)], want[start : start + len(part)]), (size, start)
            assert not got[len(part) :].isfinite().any()
            engine.kv.rewind(sequence, start + len(part))
        engine.kv.close(sequence)


def test_the_kv_cache_does_not_count_as_weights(tmp_path: Path, load: Load) -> None:
    engine = load(checkpoint(tmp_path), num_blocks=4000)
    before = engine.weight_bytes
    engine.forward([Row(engine.kv.open([]), tokens(3), 1)])
    # Scratch memory for three tokens, not 4,000 blocks of 8 KB.
    assert engine.weight_bytes - before < 1_000_000


@pytest.mark.parametrize(
    "shape", [{"hidden_size": 72, "head_dim": 16}, {"head_dim": 24}, {"intermediate_size": 80}], ids=str
)
def test_shapes_that_it_does_not_take_run_otherwise(tmp_path: Path, load: Load, shape: dict[str, int]) -> None:
    path = checkpoint(tmp_path, **shape)
    prompt = tokens(30)
    engine = load(path, "auto")
    assert error(engine.forward([Row(engine.kv.open([]), prompt, 30)]), reference(path, prompt)) < 0.05
    with pytest.raises(CheckpointError, match="execution: native"):
        load(path)
