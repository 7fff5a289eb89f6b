"""Mutated messages to every internal RPC. `python -m tests.soak fuzz` sends ten thousand to each."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path

import pytest
from outrider.rpc.channel import create_channel

from tests.soak.rpc_fuzz import Outcome, attack, undisturbed
from tests.soak.rpc_services import ALL, RPCS, Rpc, serving_all

PER_RPC = 15


async def test_whatever_is_sent_is_answered_and_never_as_a_fault_of_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # What earlier tests forgot is reported when it is collected: now, and not among the faults below. A client that
    # nobody has closed begins to close itself then, in a loop that is not its own.
    gc.collect()
    await asyncio.sleep(0.01)
    gc.collect()
    caplog.clear()
    outcomes: list[tuple[Rpc, Outcome]] = []
    async with serving_all(tmp_path) as addresses, undisturbed(addresses["RouterService"]) as answers:
        for rpc in ALL:
            async with create_channel(addresses[rpc.place]) as channel:
                count = PER_RPC if rpc in RPCS or rpc.streams else 4
                outcomes.append((rpc, await attack(channel, rpc, count, seed=1, num_directed=count)))
    for rpc, outcome in outcomes:
        assert outcome.faults == [], rpc.path
        # Both kinds reached it: messages that it takes, and messages that it refuses.
        assert rpc not in RPCS or (outcome.codes["OK"] and outcome.codes["INVALID_ARGUMENT"]), rpc.path
    assert len(answers) > 1 and all(tokens == answers[0] != [] for tokens in answers)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
