"""`outrider compare drafts`, from its files to its table, JSON and plot."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from outrider.comparison.compare import KnownTexts
from outrider.comparison.texts import Text, grown, kept_back, told_apart
from outrider.engine import EngineConfig, tokenizer_fingerprint
from outrider.engine.checkpoints.tokenizer import load_tokenizer
from outrider.engine.loading.loader import load_engine
from outrider.training.corpus import CorpusConfig, write_corpus
from outrider.training.shards import Corpus
from outrider.training.texts import Sampled
from outrider_controller.cli.app import run
from outrider_controller.cli.exits import ExitCode

from tests.unit.drafters.test_adapters import adapter
from tests.unit.drafters.test_other_vocabulary import twins

__all__ = ["twins"]
"""A fixture."""


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("outrider_controller.cli.drafts.compare.cache_directory", lambda: tmp_path)
    return tmp_path / "compare"


def lines(file: Path, *rows: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_draft_that_is_the_target_is_right_and_the_answers_are_written_once(
    tiny: Path, tmp_path: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = lines(
        tmp_path / "prompts.jsonl",
        {"category": "a", "prompt": "one two one two one two"},
        {"category": "b", "prompt": "three"},
    )
    plot = tmp_path / "plot.svg"
    command = ["compare", "drafts", str(tiny), "ngram", "--target-model", str(tiny), "--prompts", str(prompts)]
    assert run([*command, "--max-tokens", "24", "-o", "json", "--plot", str(plot)]) == ExitCode.OK
    out, err = capsys.readouterr()
    found = json.loads(out)
    by_name = {each["name"]: each for each in found["drafts"]}
    assert found["schema"] == "outrider/compare-drafts/v1" and by_name[str(tiny)]["all"]["acceptance"] == 1.0
    assert set(by_name[str(tiny)]["categories"]) == {"a", "b"}
    assert set(by_name["ngram"]["times_plain"]) == {"1", "8", "32"} and found["best"] in by_name
    # A model reads no features, and has no place in a target; lookups have no place elsewhere.
    ways = {(place["name"], place["on_worker"]) for place in found["places"]}
    assert ways == {("", False), (str(tiny), True)} and found["measured"]["drafts"][0]["feature_bytes"] == 0
    # Its guesses are trees: a token, and three that it finds as likely.
    assert found["measured"]["drafts"][0]["rounds"][0]["drafted"] > 3
    assert "the target answers 2 prompts" in err and len(list(kept.rglob("*.json"))) == 1
    labels = [element.text for element in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert {"ngram", str(tiny), "1 stream", "32 streams"} <= set(labels)
    assert f"{by_name['ngram']['times_plain']['1']:.2f}" in labels
    assert run([*command, "--max-tokens", "24"]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "answers 2 prompts" not in err and "fastest at one stream" in out and "most tokens with 8 streams: " in out


def test_a_model_with_other_tokens_is_compared_as_it_would_draft(
    twins: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same model under other ids: whatever the target says, it says too."""
    target, draft = twins
    assert tokenizer_fingerprint(target) != tokenizer_fingerprint(draft)
    prompts = lines(tmp_path / "prompts.jsonl", {"prompt": "".join(map(chr, range(0x4E00, 0x4E20)))})
    command = ["compare", "drafts", str(draft), "--target-model", str(target), "--prompts", str(prompts)]
    assert run([*command, "--max-tokens", "24", "-o", "json"]) == ExitCode.OK
    [found] = json.loads(capsys.readouterr().out)["drafts"]
    assert found["all"]["acceptance"] == 1.0 and found["all"]["tokens_per_round"] >= 2


def test_an_adapter_is_compared_by_its_directory_with_the_model_that_it_is_of(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, loud = lines(tmp_path / "prompts.jsonl", {"prompt": "one two one"}), adapter(tmp_path / "loud", tiny, 1)
    command = ["compare", "drafts", str(tiny), str(loud), "--target-model", str(tiny), "--prompts", str(prompts)]
    assert run([*command, "--max-tokens", "24", "-o", "json"]) == ExitCode.OK
    found = {each["name"]: each["all"] for each in json.loads(capsys.readouterr().out)["drafts"]}
    assert found[str(tiny)]["acceptance"] == 1.0 and found[str(loud)]["acceptance"] < 0.5


def test_a_prediction_is_a_draft_where_the_prompts_carry_one(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = lines(tmp_path / "samples.jsonl", {"prompt": "x", "answer": "abcdefgh" * 3, "prediction": "abcdefgh" * 3})
    command = ["compare", "drafts", "prediction", "--target-model", str(tiny), "--samples", str(said), "-o", "json"]
    assert run(command) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    [draft] = found["drafts"]
    assert draft["all"]["tokens_per_round"] > 2 and draft["all"]["acceptance"] > 0.9
    # A model with random weights would not have said this.
    assert found["agreement"] < 0.5


def test_what_a_distillation_kept_back_of_recorded_requests_is_compared(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [Sampled((40 + n, 41, 42), tuple(range(50, 74))) for n in range(40)]
    engine = load_engine(tiny, EngineConfig(num_blocks=512, prefix_cache=False))
    corpus = CorpusConfig(samples=tuple(samples), concurrency=4)
    write_corpus(engine, load_tokenizer(tiny), tmp_path / "corpus", corpus, lambda done, total: None)
    kept = {tuple(sample.prompt) for sample in Corpus(tmp_path / "corpus", engine.info.vocab_size).held_out}
    texts = kept_back(tmp_path / "corpus", engine.info.vocab_size, 8)
    assert {tuple(text.prompt) for text in texts} == kept and 0 < len(kept) < 40
    assert all(text.answer == list(range(50, 58)) for text in texts)

    command = ["compare", "drafts", "ngram", "--target-model", str(tiny), "-o", "json", "--held-out"]
    assert run([*command, str(tmp_path / "corpus")]) == ExitCode.OK
    out, err = capsys.readouterr()
    found = json.loads(out)
    # A model with random weights would not have said this, and nothing was asked of it.
    assert found["agreement"] < 0.5 and "the target answers" not in err
    # No token of an answer is there twice, and nothing follows it.
    assert found["drafts"][0]["all"]["tokens_per_round"] == 1.0
    assert run([*command, str(tmp_path)]) == ExitCode.ERROR
    assert "no corpus of outrider distill" in capsys.readouterr().err


def test_of_several_answers_to_one_prompt_one_is_compared_and_not_counted_for_the_others(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "abcdefghijklmnopqrstuvwxyz"
    samples = [{"prompt": "x", "answer": said[n:] + said[:n].upper()} for n in range(0, 24, 8)]
    file = lines(tmp_path / "samples.jsonl", *samples, samples[0])
    command = ["compare", "drafts", "suffix", "--target-model", str(tiny), "--samples", str(file), "-o", "json"]
    assert run(command) == ExitCode.OK
    out, err = capsys.readouterr()
    # Only the answer that comes again is known: 26 letters, and an end.
    assert json.loads(out)["drafts"][0]["all"]["tokens_per_round"] < 2.01
    assert "leaves out 2 of 4 answers" in err


def test_a_replay_goes_on_with_the_longer_of_two_texts_and_with_the_first_of_two_that_differ() -> None:
    both = [Text("all", [1], [2, 3], []), Text("all", [1], [2, 3, 4], [])]
    others = [Text("all", [1], [2, 5], []), Text("all", [1, 2], [5], []), Text("all", [1, 2, 5], [6], [])]
    assert told_apart([*both, *others]) == [*both, others[2]]
    beginning = grown(grown(grown(0, 1), 2), 3)
    assert KnownTexts([text.tokens for text in both]).token_after(beginning) == 4


@pytest.mark.parametrize(
    ("drafts", "row", "message"),
    [
        (["ngram+ngram"], {"prompt": "x"}, "drafts: ngram+ngram is not served"),
        (["no-such-model"], {"prompt": "x"}, "no-such-model"),
        (["ngram"], {"prompt": "x", "category": 3}, "line 1: category: must be a text"),
        (["ngram"], {"answer": "x"}, "line 1: prompt: must be a text"),
    ],
)
def test_what_cannot_be_compared_is_named(
    tiny: Path,
    tmp_path: Path,
    drafts: list[str],
    row: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = lines(tmp_path / "prompts.jsonl", row)
    assert run(["compare", "drafts", *drafts, "--target-model", str(tiny), "--prompts", str(file)]) == ExitCode.ERROR
    assert message in capsys.readouterr().err
