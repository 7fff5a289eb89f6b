"""Peers that lie in their answers: targets, draft workers of both kinds, and the control plane."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.soak.lying import among_liars, answers


async def lied_to(directory: Path, num_requests: int, caplog: pytest.LogCaptureFixture) -> None:
    async with among_liars(directory, seed=1) as lied:
        plain = await answers(lied, 2)
        assert len(plain.innocent) == 2 and plain.num_failed == 0
        for liar in lied.liars.values():
            liar.share = 0.2
        found = await answers(lied, num_requests)
        assert found.innocent == plain.innocent
        assert found.num_ended == num_requests
        assert all(liar.num_lies for liar in lied.liars.values())
    ours = [record for record in caplog.records if record.name.startswith("outrider")]
    assert [record for record in ours if record.levelno >= logging.ERROR] == []


async def test_no_lie_changes_what_others_say_or_leaves_a_request_without_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await lied_to(tmp_path, 16, caplog)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_hundreds_of_lies_change_nothing_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await lied_to(tmp_path, 200, caplog)
