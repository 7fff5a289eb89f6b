"""Recorded steps say what eager ones say; a step brings one thing back; speculation changes no text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from outrider.engine import Engine, EngineConfig, EngineSequence, Row
from outrider.engine.loading.loader import load_engine
from outrider.engine.models.fused_gpu import GpuLlama
from outrider.engine.run.buckets import make_buckets
from outrider.engine.run.graphs import GraphRunner
from outrider.speculation import (
    Candidate,
    DraftDistribution,
    LogitsOptions,
    LogitsProcessor,
    SamplingParams,
    VerificationMode,
)
from outrider.testing.tiny import tiny_checkpoint
from outrider.tree import DraftTree
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.judged import verify
from tests.unit.engine.models.test_fused_gpu import (
    FUSED,
    has_the_same_logits_alone_in_a_batch_and_as_a_draft,
    says_what_transformers_says,
)

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=7)
PROMPT = [random.Random(1).randrange(3, 300) for _ in range(100)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", layers=4)


def load(checkpoint: Path, **changes: object) -> Engine:
    settings = {"device": "cuda", "dtype": "float32", "num_blocks": 200, "graph_rows": 8, "max_batch_tokens": 128}
    return load_engine(checkpoint, EngineConfig(**(settings | changes)))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["fused", "transformers"])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Engine:
    return load(checkpoint, execution=request.param)


def test_every_bucket_is_captured_at_start(engine: Engine) -> None:
    assert isinstance(engine._graphs, GraphRunner)
    assert set(engine._graphs._graphs) == {(bucket, ()) for bucket in make_buckets(8, 128)}


def test_the_fused_execution_is_what_a_llama_gets(checkpoint: Path) -> None:
    assert isinstance(load(checkpoint)._decoder, GpuLlama)


def play(engine: Engine) -> list[Tensor]:
    """A prefill, then steps of ragged rows, some of whose tokens are taken back."""
    rng = random.Random(1)
    sequences = [engine.kv.open([]) for _ in range(5)]
    out = [engine.forward([Row(s, PROMPT[: 5 + 7 * n], 1) for n, s in enumerate(sequences)]).clone()]
    for step in range(12):
        rows = []
        for sequence in sequences[: 1 + step % 5]:
            count = rng.randint(1, 8)
            rows.append(Row(sequence, [rng.randrange(300) for _ in range(count)], rng.randint(1, count)))
        out.append(engine.forward(rows).clone())
        for row in rows:
            engine.kv.rewind(row.sequence, row.sequence.cached_len - rng.randrange(len(row.token_ids)))
    for sequence in sequences:
        engine.kv.close(sequence)
    return out


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_recorded_steps_say_what_eager_ones_say(engine: Engine, checkpoint: Path) -> None:
    for now, before in zip(play(engine), play(load(checkpoint, cuda_graphs=False)), strict=True):
        assert_close(now, before)


def test_recorded_steps_say_what_transformers_says(engine: Engine, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda()
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT], device="cuda")).logits[0]
    sequence, found = engine.kv.open([]), []
    for start in range(0, len(PROMPT), 4):
        found.append(engine.forward([Row(sequence, PROMPT[start : start + 4], 4)]).clone())
    engine.kv.close(sequence)
    assert_close(torch.cat(found), want)


@pytest.mark.parametrize("name", FUSED)
def test_each_fused_family_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    says_what_transformers_says(name, tmp_path, "cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_has_the_same_logits_alone_in_a_batch_and_as_a_draft(dtype: str, tmp_path: Path) -> None:
    has_the_same_logits_alone_in_a_batch_and_as_a_draft(dtype, tmp_path, "cuda")


def copies(run: Callable[[], object]) -> dict[str, int]:
    """Copies between host and device that the run makes, by direction."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {way: sum(f"Memcpy {way}" in name for name in names) for way in ("HtoD", "DtoH")}


@pytest.mark.parametrize("asked", [False, True], ids=["", "penalties and log probabilities"])
@pytest.mark.parametrize(
    ("mode", "params", "sent"),
    [
        (VerificationMode.GREEDY, GREEDY, 1),
        (VerificationMode.COUPLED, SAMPLED, 2),
        (VerificationMode.RATIO, SAMPLED, 2),
    ],
    ids=["greedy", "coupled", "ratio"],
)
def test_a_step_brings_back_one_copy(
    engine: Engine, mode: VerificationMode, params: SamplingParams, sent: int, asked: bool
) -> None:
    options = LogitsOptions(repetition_penalty=1.2, bad_words=((7,),), logit_bias=((5, 1.0),))
    processor, num_top = (LogitsProcessor(options, PROMPT[:21]), 5) if asked else (None, None)
    sent = 2 if asked else sent
    sequences = [engine.kv.open([]) for _ in range(3)]
    engine.forward([Row(s, PROMPT[:20], 1) for s in sequences])
    drafted = [11, 12, 13]
    ratio = mode is VerificationMode.RATIO
    q = tuple(DraftDistribution((token,), (1 << 16,)) for token in drafted) if ratio else ()
    draft = DraftTree(21, tuple(drafted), q=q)

    def step() -> None:
        logits = engine.forward([Row(s, [9, *drafted], 4) for s in sequences])
        verify(logits, [Candidate(params, mode, draft, processor, num_top) for _ in sequences])
        for sequence in sequences:
            engine.kv.rewind(sequence, 20)

    assert copies(step) == {"HtoD": sent, "DtoH": 1}
    for sequence in sequences:
        engine.kv.close(sequence)


def generate(
    engine: Engine, mode: VerificationMode, params: SamplingParams, drafts: Sequence[int], k: int
) -> list[int]:
    """80 tokens after PROMPT; `drafts` is what is guessed for each of them, `k` of them at a time."""
    text = list(PROMPT)
    sequence: EngineSequence = engine.kv.open([])
    while len(text) < len(PROMPT) + 80:
        at = len(text) - len(PROMPT)
        guess = list(drafts[at : at + k])
        pending = [*text[sequence.cached_len :], *guess]
        logits = engine.forward([Row(sequence, pending, len(guess) + 1)])
        [verdict] = verify(logits, [Candidate(params, mode, DraftTree(len(text), tuple(guess)))])
        text += verdict.token_ids
        engine.kv.rewind(sequence, len(text) - 1)
    engine.kv.close(sequence)
    return text[len(PROMPT) :][:80]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mode", "params"), [(VerificationMode.GREEDY, GREEDY), (VerificationMode.COUPLED, SAMPLED)])
def test_speculation_changes_no_text(
    checkpoint: Path, mode: VerificationMode, params: SamplingParams, dtype: str
) -> None:
    engine = load(checkpoint, dtype=dtype)
    plain = generate(engine, mode, params, [], 0)
    rng = random.Random(5)
    drafts = [token if rng.random() < 0.7 else rng.randrange(300) for token in plain]
    for k in (1, 2, 3, 5, 7):
        assert generate(engine, mode, params, drafts, k) == plain


def test_the_bits_of_a_verified_token_are_those_of_a_decoded_one(checkpoint: Path) -> None:
    """Of one sequence: its steps of up to 16 tokens are products of one shape."""
    engine = load(checkpoint, dtype="bfloat16")
    found = []
    for size in (1, 2, 5, 8):
        sequence = engine.kv.open([])
        engine.forward([Row(sequence, PROMPT[:20], 0)])
        parts = [
            engine.forward([Row(sequence, PROMPT[start : start + size], size)]).clone()
            for start in range(20, 100, size)
        ]
        engine.kv.close(sequence)
        found.append(torch.cat(parts))
    for other in found[1:]:
        assert torch.equal(other, found[0])
