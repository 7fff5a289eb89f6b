"""The comparison of whole answers: who is asked when, and a peer that fails."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers import answers
from benchmarks.peers.answers import Limits, Question, take_turns
from benchmarks.peers.subjects import PeerFailed
from benchmarks.support.prompts import Prompt

LIMITS = Limits(max_tokens=3, ignore_eos=True)
QUESTIONS = [Question(Prompt(str(number), "qa", "?"), [1, 2]) for number in range(3)]


class Fake:
    """Answers at once; fails at its prompt `fails_at`."""

    def __init__(self, name: str, log: list[str], fails_at: str = "") -> None:
        self.name = name
        self._log = log
        self._fails_at = fails_at

    async def answer(self, question: Question, limits: Limits) -> dict[str, Any]:
        if question.prompt.id == self._fails_at:
            raise PeerFailed("no memory")
        self._log.append(self.name)
        return {"token_ids": [5] * limits.max_tokens, "s": 1.0, "first_s": 0.5, "steps": 2}


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_REST_S", 0.0)


async def test_every_other_prompt_is_asked_in_reverse() -> None:
    log: list[str] = []
    found = await take_turns([Fake("ours", log), Fake("peer", log)], QUESTIONS, LIMITS, {})
    assert log == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert len(found) == 6 and found[0].token_ids == (5, 5, 5)


async def test_a_peer_that_fails_is_left_out_with_all_its_answers_and_the_others_go_on() -> None:
    log: list[str] = []
    failures: dict[str, str] = {}
    asked = [Fake("ours", log), Fake("peer", log, fails_at="1")]
    found = await take_turns(asked, QUESTIONS, LIMITS, failures)
    assert {answer.subject for answer in found} == {"ours"} and len(found) == 3
    assert failures == {"peer": "no memory"}
    assert log.count("peer") == 1
