"""What `outrider distill` says before it begins, and when it is interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.samples import SampleStore
from outrider.training.shards import stored_tokens
from outrider_controller.cli.app import run
from outrider_controller.cli.drafts.time_left import TimeLeft
from outrider_controller.cli.exits import ExitCode


def test_it_says_what_it_will_do_and_an_interruption_keeps_what_was_written(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: TimeLeft, stage: str, done: int, total: int, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TimeLeft, "__call__", interrupt)
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


def test_what_is_learnt_from_samples_lies_beside_them(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: TimeLeft, stage: str, done: int, total: int, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TimeLeft, "__call__", interrupt)
    store = SampleStore(tmp_path / "samples")
    store.write("a", 0.2, {"prompt": [40, 41], "output": [50, 51]})
    command = ["distill", str(tmp_path / "draft"), "--target-model", str(tiny), "--from-samples", "a"]
    assert run(command) == ExitCode.USAGE
    assert "--from-samples and --samples-dir belong together" in capsys.readouterr().err
    assert run([*command, "--samples-dir", str(store.directory)]) == ExitCode.INTERRUPTED
    assert stored_tokens(store.of("a") / "distill-model") > 0
    assert store.erase("a") == 1 and not store.of("a").exists()
