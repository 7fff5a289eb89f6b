"""Corpora of a user's own prompts and answers."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from outrider.engine import CheckpointError, Engine, EngineConfig, Row
from outrider.engine.loading.loader import load_engine
from outrider.samples import SampleStore
from outrider.testing.tiny import tiny_checkpoint, tiny_tokenizer
from outrider.training.corpus import CorpusConfig, write_corpus
from outrider.training.shards import Corpus, Sample, list_shards, read_corpus, save_shard
from outrider.training.texts import Sampled, read_prompts, read_recorded, read_samples
from torch import Tensor

FEW_AND_MANY = (1, 5)
"""Seeds with 3 prompts and with 200."""
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    tiny = tiny_checkpoint(tmp_path_factory.mktemp("target"), max_context_len=1024)
    return load_engine(tiny, EngineConfig(dtype="float32", num_blocks=512, prefix_cache=False))


def lines(file: Path, *rows: object) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def corpus(engine: Engine, directory: Path, config: CorpusConfig) -> list[Sample]:
    write_corpus(engine, tiny_tokenizer(), directory, config, lambda done, total: None)
    return [sample for shard in list_shards(directory) for sample in read_corpus(shard)]


def test_the_target_answers_the_prompts_of_a_file_as_it_would_in_serving(engine: Engine, tmp_path: Path) -> None:
    file = lines(
        tmp_path / "prompts.jsonl",
        {"id": 1, "prompt": "Count to three."},
        {"turns": ["Name a colour.", "Another one."], "category": "qa"},
        {"messages": [{"role": "user", "content": "Hello"}]},
    )
    config = CorpusConfig(prompts=tuple(read_prompts(file)), answer_tokens=12, concurrency=2)
    samples = corpus(engine, tmp_path / "corpus", config)
    tokenizer = tiny_tokenizer()
    texts = {tokenizer.decode(sample.prompt) for sample in samples}
    assert texts == {CHAT.format(text) for text in ("Count to three.", "Name a colour.", "Hello")}
    assert len(samples) == 4 * 3
    greedy = 0
    for sample in samples:
        ids = sample.token_ids.tolist()
        logits = engine.forward([Row(engine.kv.open([]), ids[:-1], len(ids) - 1)])
        chosen = logits.argmax(-1)[len(sample.prompt) - 1 :].tolist()
        greedy += chosen == ids[len(sample.prompt) :]
        assert sample.answers.tolist() == [i >= len(sample.prompt) for i in range(1, len(ids))]
    # One of four passes over the prompts is greedy: a second one would say the same.
    assert greedy >= 3 and len({tuple(sample.token_ids.tolist()) for sample in samples}) == 4 * 3


def test_states_are_kept_where_the_next_step_overwrites_them(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As recorded steps do: they have one buffer for the states of all steps."""
    config = CorpusConfig(prompts=tuple(({"role": "user", "content": text},) for text in ("One.", "Two, and more.")))
    plain = corpus(engine, tmp_path / "plain", config)
    tapped, buffers = engine.forward_tapped, list[Tensor]()

    def in_one_buffer(rows: Sequence[Row], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        for before in buffers:
            before.fill_(torch.nan)
        found = tapped(rows, layers)
        buffers.append(found[1])
        return found

    monkeypatch.setattr(engine, "forward_tapped", in_one_buffer)
    for now, want in zip(corpus(engine, tmp_path / "reused", config), plain, strict=True):
        assert torch.equal(now.token_ids, want.token_ids) and torch.equal(now.hidden, want.hidden)


def test_writing_that_has_a_time_ends_with_it_and_keeps_what_is_there(engine: Engine, tmp_path: Path) -> None:
    config = CorpusConfig(tokens=10**9, concurrency=2, max_len=64, seconds=0.01)
    assert 0 < len(corpus(engine, tmp_path / "corpus", config)) < 20


def test_a_second_run_goes_on_with_the_prompts_that_are_left(engine: Engine, tmp_path: Path) -> None:
    file = lines(tmp_path / "prompts.jsonl", *({"prompt": f"Question {n}"} for n in range(6)))
    prompts = tuple(read_prompts(file))
    first = corpus(
        engine, tmp_path / "corpus", CorpusConfig(tokens=100, prompts=prompts, answer_tokens=8, concurrency=1)
    )
    every = corpus(
        engine, tmp_path / "corpus", CorpusConfig(tokens=9_999, prompts=prompts, answer_tokens=8, concurrency=1)
    )
    assert 0 < len(first) < 6 and len(every) == 4 * 6
    assert [s.token_ids.tolist() for s in every[: len(first)]] == [s.token_ids.tolist() for s in first]
    assert len({tuple(sample.prompt) for sample in every}) == 6


def test_a_second_run_reads_an_answer_that_the_first_one_had_begun_and_none_twice(
    engine: Engine, tmp_path: Path
) -> None:
    """The first, long one is still being read when shorter ones are done."""
    answers = ["long " * 100, *(f"answer {n}" for n in range(6))]
    file = lines(tmp_path / "samples.jsonl", *({"prompt": f"Question {n}", "answer": a} for n, a in enumerate(answers)))
    samples, told = tuple(read_samples(file)), list[tuple[int, int]]()
    first = corpus(engine, tmp_path / "corpus", CorpusConfig(tokens=100, samples=samples))
    assert 0 < len(first) < 6 and max(len(sample.token_ids) for sample in first) < 100
    config = CorpusConfig(tokens=9_999, samples=samples)
    write_corpus(engine, tiny_tokenizer(), tmp_path / "corpus", config, lambda *now: told.append(now))
    every = corpus(engine, tmp_path / "corpus", config)
    assert len(every) == len({tuple(sample.token_ids.tolist()) for sample in every}) == 7
    assert told[-1][0] == told[-1][1] == sum(len(sample.token_ids) for sample in every), "the end is in sight"


def test_a_second_run_reads_another_answer_to_a_prompt_of_the_first_and_not_that_of_the_first_again(
    engine: Engine, tmp_path: Path
) -> None:
    old, new = Sampled((5, 6), (7, 8)), Sampled((5, 6), (9, 10))
    corpus(engine, tmp_path / "corpus", CorpusConfig(samples=(old,)))
    every = corpus(engine, tmp_path / "corpus", CorpusConfig(samples=(new, old)))
    assert [sample.token_ids.tolist() for sample in every] == [[5, 6, 7, 8], [5, 6, 9, 10]]


def test_answers_that_exist_are_read_and_none_is_written(engine: Engine, tmp_path: Path) -> None:
    file = lines(
        tmp_path / "samples.jsonl",
        {"prompt": "Say it.", "answer": "It."},
        {"messages": [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Nothing more."}]},
    )
    samples = corpus(engine, tmp_path / "corpus", CorpusConfig(samples=tuple(read_samples(file)), concurrency=8))
    texts = sorted(tiny_tokenizer().decode(sample.token_ids) for sample in samples)
    assert texts == [CHAT.format("And now?") + "Nothing more.<|im_end|>", CHAT.format("Say it.") + "It.<|im_end|>"]
    for sample in samples:
        ids = sample.token_ids[:-1].tolist()
        _, hidden = engine.forward_with_hidden([Row(engine.kv.open([]), ids, len(ids))])
        torch.testing.assert_close(hidden, sample.hidden, rtol=1e-4, atol=1e-4)


def answered(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    ids = torch.tensor([*prompt, *answer], dtype=torch.int32)
    answers = torch.arange(1, len(ids)) >= len(prompt)
    return Sample(ids, torch.zeros(len(ids) - 1, 2), answers)


def split(directory: Path, shards: int) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Which prompts are kept back, and which are learnt in whole passes."""
    found, rng = Corpus(directory, 384), random.Random(0)
    passes = itertools.islice(found.passes(rng), 3 * shards)
    learnt = {tuple(sample.prompt) for samples in passes for sample in samples}
    assert found.num_tokens == found.token_counts.sum()
    return {tuple(sample.prompt) for sample in found.held_out}, learnt


@pytest.mark.parametrize(
    "seed", [each if each in FEW_AND_MANY else pytest.param(each, marks=pytest.mark.slow) for each in range(40)]
)
def test_what_is_kept_back_was_never_learnt_whatever_shard_it_is_in_and_however_the_corpus_has_grown(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(384) for _ in range(rng.choice((1, 9, 600)))] for _ in range(rng.choice((3, 20, 200)))]
    learnt: set[tuple[int, ...]] = set()
    for number in range(4):
        # The last shard of a run is often tiny; and prompts come again, with another answer and another cut.
        some = rng.sample(prompts, max(2, len(prompts) >> number)) if number < 3 else [rng.choice(prompts)]
        cut = [prompt[-rng.choice((512, 590, 600)) :] for prompt in some]
        save_shard([answered(prompt, [1] * rng.randrange(1, 5)) for prompt in cut], tmp_path, number)
        kept, now = split(tmp_path, number + 1)
        learnt |= {prompt[-512:] for prompt in now}
        assert kept and now and not {prompt[-512:] for prompt in kept} & learnt
    ours = {tuple(prompt[-512:]) for prompt in prompts}
    assert {prompt[-512:] for prompt in kept | now} == ours


def test_a_corpus_in_which_nothing_is_left_to_learn_from_is_refused(tmp_path: Path) -> None:
    save_shard([answered([7, 8], [9]), answered([7, 8], [10])], tmp_path, 0)
    with pytest.raises(CheckpointError, match="all its prompts are kept back"):
        Corpus(tmp_path, 384)


def test_a_training_whose_corpus_is_removed_ends(tmp_path: Path) -> None:
    save_shard([answered([n, 8], [9]) for n in range(20)], tmp_path, 0)
    passes = Corpus(tmp_path, 384).passes(random.Random(0))
    assert next(passes)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match="the corpus is gone"):
        next(passes)


def test_no_answer_to_a_prompt_that_is_held_out_is_learnt_from(engine: Engine, tmp_path: Path) -> None:
    file = lines(tmp_path / "prompts.jsonl", *({"prompt": f"Question {n}"} for n in range(80)))
    config = CorpusConfig(prompts=tuple(read_prompts(file)), answer_tokens=4)
    corpus(engine, tmp_path / "corpus", config)
    kept, learnt = split(tmp_path / "corpus", 1)
    assert kept and learnt and not kept & learnt and len(kept) + len(learnt) == 80


BAD_PROMPTS = {
    "{": "line 1: .*",
    '{"turns": []}': r"line 1: turns: must be a list",
    '{"prompt": 5}': r"line 1: prompt: must be a text",
    '{"messages": [{"role": "assistant", "content": "a"}]}': r"line 1: messages\[0\]\.role: must be user",
    "[]": "line 1: not a JSON object",
    "": "no lines",
}


@pytest.mark.parametrize("text", BAD_PROMPTS)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=BAD_PROMPTS[text]):
        read_prompts(file)


def test_a_sample_without_an_answer_is_refused_by_its_number(tmp_path: Path) -> None:
    file = lines(tmp_path / "samples.jsonl", {"prompt": "a", "answer": "b"}, {"prompt": "a"})
    with pytest.raises(ValueError, match="line 2: messages: must be a list"):
        read_samples(file)


def test_requests_that_a_target_recorded_are_read_by_their_token_ids(engine: Engine, tmp_path: Path) -> None:
    store, recorded = SampleStore(tmp_path / "samples"), [([40, 41, 42], [50, 51, 2]), ([60, 61], [70, 71, 72])]
    for acceptance, (prompt, output) in zip((0.9, 0.1), recorded, strict=True):
        store.write("a", acceptance, {"prompt": prompt, "output": output})
    store.write("a", 0.0, {"verified": {"ngram": 3}})
    store.write("b", 0.0, {"prompt": [1], "output": [2]})
    asked = read_recorded(store, "a")
    assert [(list(one.prompt), list(one.answer)) for one in asked] == recorded[::-1], "the lowest acceptance first"
    samples = corpus(engine, tmp_path / "corpus", CorpusConfig(samples=tuple(asked)))
    assert sorted(sample.token_ids.tolist() for sample in samples) == sorted(p + o for p, o in recorded)
    for sample in samples:
        assert sample.answers.sum() == 3
    told: list[tuple[int, int]] = []
    config = CorpusConfig(samples=tuple(asked))
    write_corpus(engine, tiny_tokenizer(), tmp_path / "again", config, lambda *now: told.append(now))
    assert told[-1] == (11, 11), "as many tokens as were recorded"
    with pytest.raises(ValueError, match="no samples of c"):
        read_recorded(store, "c")
