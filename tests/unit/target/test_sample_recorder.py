"""What samples cost a step and the memory, and a volume that does not answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography.fernet import Fernet
from outrider.options.logprobs import TokenLogprobs
from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.protocol.rounds import SourceTokens
from outrider.samples import SampleStore
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SampleConsent, SequenceSpec
from outrider.target import samples as module
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Times
from outrider.target.samples import SampleRecorder, _Sample
from outrider.training.texts import read_recorded

TOP = TokenLogprobs(-1.25, tuple(range(9)), tuple(-1.23456 * n for n in range(9)))


class Watched(list[int]):
    """Which threads read more than its length."""

    readers: set[str]

    def _noted(self) -> None:
        self.readers.add(threading.current_thread().name)

    def __iter__(self) -> Iterator[int]:
        self._noted()
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self._noted()
        return super().__getitem__(place)


def watched(count: int) -> Watched:
    made = Watched(range(count))
    made.readers = set()
    return made


def opened(prompt: list[int], committed: tuple[int, ...] = (), tenant: str = "a", consent_us: int = 5) -> SequenceSpec:
    text = {"samples": SampleConsent.TEXT, "tenant": tenant, "consent_unix_us": consent_us, "committed": committed}
    params = SamplingParams(temperature=0.5)
    return SequenceSpec(cast(Any, prompt), params, VerificationMode.COUPLED, **cast(Any, text))


def answer(recorder: SampleRecorder, opening: SequenceSpec, number: int = 1, steps: int = 3) -> None:
    key = SequenceKey(0, number)
    recorder.open(key, opening)
    for step in range(steps):
        row: StepRow[Any] = StepRow(
            sequence=None, key=key, base_len=0, token_ids=(2 * step, 2 * step + 1), top=(TOP, TOP)
        )
        row.sources = (SourceTokens("ngram", True, num_drafted=2, num_verified=2, num_accepted=1),)
        recorder.note(TargetReport(commits=[row]))
    recorder.note(TargetReport(removed=[(key, Times())]))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The volume: whoever opens a file there waits until this is set."""
    answers, opened, waits = threading.Event(), module.SampleStore.write_parts, threading.Event()

    def write(self: SampleStore, *arguments: Any) -> None:
        waits.set()
        answers.wait()
        opened(self, *arguments)

    monkeypatch.setattr(SampleStore, "write_parts", write)
    answers.waits = waits  # type: ignore[attr-defined]
    yield answers
    answers.set()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_step_adds_what_it_committed_and_the_record_is_built_elsewhere_in_small_parts(
    tmp_path: Path, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SampleStore(tmp_path, Fernet(Fernet.generate_key()) if encrypted else None)
    dumped, dumps = list[tuple[str, int]](), json.dumps
    prompt = watched(131_072)

    def noted(value: Any, **options: Any) -> str:
        dumped.append((threading.current_thread().name, len(value)))
        return dumps(value, **options)

    monkeypatch.setattr(json, "dumps", noted)
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    recorder = SampleRecorder(store, "rev")
    answer(recorder, opened(prompt, committed=(7, 8)), steps=100)
    recorder.close()
    recorder._thread.join(60)
    assert {name for name, _ in dumped} == prompt.readers == {"samples"}
    assert len(dumped) > 2_000 and max(size for _, size in dumped) <= 64
    [record] = store.read("a")
    assert record["prompt"] == list(range(131_072)) and record["committed"] == [7, 8]
    assert record["output"] == list(range(200)) and record["verified"] == {"ngram": 200}
    assert record["top_token_ids"] == [list(range(8))] * 200
    assert record["top_logprobs"] == [[round(-1.23456 * n, 3) for n in range(8)]] * 200
    # The answer begins where the lost target's did.
    [read] = read_recorded(store, "a")
    assert read.prompt == tuple(range(131_072)) and read.answer == (7, 8, *range(200))
    assert recorder.held_bytes == 0


def test_a_volume_that_does_not_answer_holds_a_bounded_number_of_bytes_and_no_exit(
    tmp_path: Path, stuck: threading.Event
) -> None:
    recorder = SampleRecorder(SampleStore(tmp_path), "rev", max_bytes=100_000)
    for number in range(200):
        answer(recorder, opened(list(range(100)), tenant="ab"[number % 2]), number)
        assert recorder.held_bytes <= 100_000
    held = sum(one.num_bytes for one in recorder._work if isinstance(one, _Sample))
    assert 50_000 < held <= recorder.held_bytes and 0 < recorder.num_dropped < 200
    # One that runs for long is dropped as it grows.
    before = recorder.num_dropped
    answer(recorder, opened([]), 999, steps=5_000)
    assert recorder.num_dropped == before + 1
    # What is ordered to be erased does not wait in memory either.
    assert stuck.waits.wait(60)  # type: ignore[attr-defined]
    told = list[tuple[int, str, bool]]()
    recorder.erase("a", 6, lambda *said: told.append(said))
    assert {one.spec.tenant for one in recorder._work if isinstance(one, _Sample)} == {"b"} and not told
    recorder.close()
    stuck.set()
    recorder._thread.join(60)
    assert [held for _, _, held in told] == [False] and told[0][0] > 0 and recorder.held_bytes == 0
    assert not list(SampleStore(tmp_path).read("a")) and list(SampleStore(tmp_path).read("b"))
