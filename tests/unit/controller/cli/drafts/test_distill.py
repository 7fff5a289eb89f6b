"""What `outrider distill` says before it begins, and when it is interrupted."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from cryptography.fernet import Fernet
from outrider.engine import CheckpointError
from outrider.samples import SampleStore, read_cipher
from outrider.training.distill import DistillConfig, DistillReport
from outrider.training.shards import list_shards, read_corpus, stored_tokens
from outrider_controller.cli.app import run
from outrider_controller.cli.drafts.distill import TimeLeft, measured
from outrider_controller.cli.exits import ExitCode
from safetensors.torch import save_file


@pytest.fixture(autouse=True)
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distillation ends at its first word of progress."""

    def interrupt(self: TimeLeft, stage: str, done: int, total: int, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TimeLeft, "__call__", interrupt)


def test_it_says_what_it_will_do_and_an_interruption_keeps_what_was_written(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the corpus: in an empty cache the kernels would be compiled anew.
    monkeypatch.setattr("outrider_controller.cli.drafts.distill.cache_directory", lambda: tmp_path)
    command = ["distill", str(tmp_path / "draft"), "--target-model", str(tiny), "--corpus-tokens", "50000"]
    assert run(command) == ExitCode.INTERRUPTED
    (work,) = (tmp_path / "distill").iterdir()
    kept = stored_tokens(work)
    first, last = capsys.readouterr().err.splitlines()
    assert f"{tiny} writes 50,000 tokens into {work};" in first and f"the draft in {tmp_path / 'draft'}" in first
    assert kept > 0 and f"interrupted; {kept} of 50,000 tokens of the corpus are kept in {work}" in last
    assert run(command) == ExitCode.INTERRUPTED
    assert f"{work} ({kept} are there from an earlier run)" in capsys.readouterr().err
    assert stored_tokens(work) > kept


def test_a_corpus_with_the_states_of_some_layers_has_a_directory_of_its_own(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_controller.cli.drafts.distill.cache_directory", lambda: tmp_path)
    command = ["distill", str(tmp_path / "draft"), "--target-model", str(tiny), "--kind", "mtp"]
    assert run([*command, "--taps", "1,x"]) == ExitCode.USAGE
    assert "--taps: '1,x' is not a list of numbers" in capsys.readouterr().err
    assert run([*command, "--taps", "0,1"]) == run(command) == ExitCode.INTERRUPTED
    with_states, without = sorted((tmp_path / "distill").iterdir(), key=lambda work: len(work.name), reverse=True)
    assert with_states.name == f"{without.name}-taps-0-1"
    (kept, *_), (plain, *_) = (read_corpus(list_shards(work)[0]) for work in (with_states, without))
    assert kept.taps is not None and kept.taps.shape[1] == 2 * kept.hidden.shape[1] and plain.taps is None


def test_a_head_that_goes_on_names_the_corpus_by_the_layers_that_it_reads(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_controller.cli.drafts.distill.cache_directory", lambda: tmp_path / "cache")
    start = tmp_path / "head"
    start.mkdir()
    (start / "config.json").write_text('{"outrider_head": {"kind": "mtp", "taps": [0, 1]}}')
    save_file({"token_map": torch.arange(9)}, start / "head.safetensors")
    command = ["distill", str(tmp_path / "out"), "--target-model", str(tiny), "--kind", "mtp", "--start", str(start)]
    assert run([*command, "--taps", "1"]) == ExitCode.ERROR
    assert "reads layers (0, 1)" in capsys.readouterr().err
    assert run(command) == ExitCode.INTERRUPTED
    [work] = (tmp_path / "cache" / "distill").iterdir()
    assert work.name.endswith("-taps-0-1")


@pytest.mark.parametrize("work", ["", "work"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_what_is_made_of_samples_lies_beside_them_and_is_encrypted_alike(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], encrypted: bool, work: str
) -> None:
    key, prompt = tmp_path / "key", list(range(40, 60))
    key.write_bytes(Fernet.generate_key())
    store = SampleStore(tmp_path / "samples", read_cipher(key) if encrypted else None)
    store.write("a", 0.2, {"prompt": prompt, "output": [50, 51]})
    command = ["distill", str(tmp_path / "draft"), "--target-model", str(tiny), "--from-samples", "a"]
    assert run(command) == ExitCode.USAGE
    assert "--from-samples and --samples-dir belong together" in capsys.readouterr().err
    command += ["--samples-dir", str(store.directory), *(["--samples-key-file", str(key)] if encrypted else [])]
    command += ["--work-dir", str(tmp_path / work)] if work else []
    # Again after an erasure: the links lead nowhere then.
    for _ in range(2):
        assert run(command) == ExitCode.INTERRUPTED
        corpus = tmp_path / work if work else store.of("a") / "distill-model"
        assert stored_tokens(corpus, store.cipher) == 22
        assert (tmp_path / "draft").resolve().is_relative_to(store.of("a"))
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path != key]
        wanted = {struct.pack("<20i", *prompt), ",".join(map(str, prompt)).encode()}
        assert any(each in path.read_bytes() for path in files for each in wanted) is not encrypted
        assert {path.stat().st_mode & 0o777 for path in files if path.is_relative_to(store.directory)} == {0o600}
        if encrypted:
            with pytest.raises(CheckpointError, match="encrypted"):
                stored_tokens(corpus)
        assert store.erase("a") == 1 and not store.of("a").exists() and not stored_tokens(corpus)
        store.write("a", 0.2, {"prompt": prompt, "output": [50, 51]})


def test_a_draft_of_samples_takes_no_place_that_is_taken_and_is_the_start_of_no_other_tenants(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, start = SampleStore(tmp_path / "samples"), tmp_path / "start"
    store.write("a", 0.2, {"prompt": [40, 41], "output": [50, 51]})
    start.mkdir()
    (start / "recipe.json").write_text('{"config": {"samples_of": "b"}}')
    command = ["distill", str(tmp_path / "draft"), "--target-model", str(tiny)]
    recorded = ["--from-samples", "a", "--samples-dir", str(store.directory)]
    for options in ([], recorded):
        assert run([*command, "--start", str(start), *options]) == ExitCode.ERROR
        assert "is made of samples of b" in capsys.readouterr().err
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "mine").touch()
    assert run([*command, *recorded]) == ExitCode.USAGE
    assert "draft exists" in capsys.readouterr().err and (tmp_path / "draft" / "mine").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--layers 0 --kind eagle3", "--layers: only for kinds model and mtp"),
        ("--layers 0 --kind medusa", "--layers: only for kinds model and mtp"),
        ("--layers 0 --start smollm2-135m-draft", "--layers: not with --start or --student"),
        ("--layers 0 --student smollm2-135m-instruct", "--layers: not with --start or --student"),
        ("--head-tokens 9 --kind mtp --start smollm2-135m-draft", "--head-tokens: not with --start or --student"),
        ("--layers , ", "--layers: ',' is not a list of numbers"),
        ("--layers 0,99", "layers: (0, 99), and the target has 2 layers"),
        ("--taps 0,99 --kind mtp", "taps: (0, 99), and the target has 2 layers"),
        ("--taps 0 --kind medusa", "taps: a draft of the kind medusa reads no layers"),
        ("--start smollm2-135m-draft --kind medusa", "start: a head of the kind medusa begins as no other draft"),
        ("--student smollm2-135m-instruct --kind mtp", "student: only for kind model"),
    ],
)
def test_an_option_that_the_student_would_not_heed_is_refused_by_its_name(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    command = ["distill", str(tmp_path / "draft"), "--target-model", str(tiny), "--work-dir", str(tmp_path / "work")]
    assert run([*command, *options.split()]) in (ExitCode.USAGE, ExitCode.ERROR)
    assert said in capsys.readouterr().err and not (tmp_path / "work").exists()


@pytest.mark.parametrize("in_use", ["", "shipped"])
def test_the_end_shows_both_temperatures_of_the_new_draft_beside_the_one_in_use(tmp_path: Path, in_use: str) -> None:
    config = DistillConfig(tmp_path / "new", tmp_path, in_use=in_use)
    others = (0.5, 0.4) if in_use else (None, None)
    took = {"held_out_loss": 1.0, "steps": 3, "train_tokens": 9, "corpus_tokens": 8, "seconds": 7.0, "bytes": 6}
    report = DistillReport(0.7, 0.6, *others, **took)  # type: ignore[arg-type]
    _, new, *rest = [line.split() for line in measured(config, report).splitlines()]
    assert new == [str(tmp_path / "new"), "0.7", "0.6"]
    assert (["shipped", "0.5", "0.4"] in rest) is bool(in_use) and ["train", "tokens", "9"] in rest


def test_a_gpu_writes_more_conversations_at_once_and_minutes_are_halved(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[DistillConfig]()

    def take(config: DistillConfig, progress: object) -> DistillReport:
        asked.append(config)
        raise CheckpointError("enough", "")

    monkeypatch.setattr("outrider.training.distill.run", take)
    command = ["distill", str(tmp_path / "draft"), "--target-model", str(tiny), "--work-dir", str(tmp_path / "work")]
    for more in (["--device", "cuda:1", "--minutes", "3"], []):
        assert run([*command, *more]) != ExitCode.OK
    on_gpu, on_cpu = asked
    assert on_gpu.corpus.concurrency > on_cpu.corpus.concurrency
    assert on_gpu.corpus.seconds == on_gpu.training.seconds == 90
    assert on_cpu.corpus.seconds == on_cpu.training.seconds == 0
    assert run([*command, "--minutes", "0"]) == ExitCode.USAGE
