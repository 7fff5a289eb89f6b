"""What a long command says while it runs."""

from __future__ import annotations

import queue

import pytest
from outrider_controller.cli.drafts.distill import TimeLeft, span


def test_the_time_left_comes_from_what_this_run_did() -> None:
    now_s = [0.0]
    progress = TimeLeft(clock=lambda: now_s[0])
    now_s[0] = 40.0
    assert progress.line() == "starting, for 40 s now"
    progress("corpus", 500, 1000, "")  # what an earlier run left
    assert progress.line() == "corpus: 50 % (500 of 1,000 tokens), time left not known"
    now_s[0] = 100.0
    progress("corpus", 600, 1000, "")
    assert progress.line() == "corpus: 60 % (600 of 1,000 tokens), about 4 min left"
    progress("train", 10, 5000, "loss 2.00")
    now_s[0] = 110.0
    progress("train", 20, 5000, "loss 1.00")
    assert progress.line() == "train: 0 % (20 of 5,000 tokens), about 1 h 23 min left; loss 1.00"


def test_a_rate_that_has_ended_is_no_rate_and_the_time_left_never_grows_in_silence() -> None:
    now_s = [0.0]
    progress = TimeLeft(clock=lambda: now_s[0])
    progress("measure", 0, 400, "")
    assert progress.line().endswith("time left not known")
    now_s[0] = 60.0
    progress("measure", 100, 400, "another draft")
    said = []
    for now_s[0] in (60.0, 90.0, 119.0, 121.0, 1800.0):
        said.append(progress.line().split("tokens), ")[1].split(";")[0])
    assert said == ["about 3 min left", "about 2 min left", "about 2 min left", *["time left not known"] * 2]
    progress("measure", 400, 400, "")
    assert progress.line().endswith("about 0 s left")


def test_it_speaks_although_nobody_reports_and_falls_silent_when_closed() -> None:
    said: queue.Queue[str] = queue.Queue()
    with TimeLeft(said.put, interval_s=0.001) as progress:
        assert said.get(timeout=30).startswith("starting")
        progress("train", 1, 2, "")
        while not said.get(timeout=30).startswith("train: 50 %"):
            pass
    assert not progress._thread.is_alive()


@pytest.mark.parametrize(("seconds", "said"), [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "1 h 0 min")])
def test_spans_as_people_say_them(seconds: float, said: str) -> None:
    assert span(seconds) == said
