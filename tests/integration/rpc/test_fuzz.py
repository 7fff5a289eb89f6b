"""Mutated messages to every internal RPC. `python -m tests.soak fuzz` sends ten thousand to each."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
from outrider.rpc.channel import create_channel

from tests.soak.rpc_fuzz import Outcome, attack
from tests.soak.rpc_services import RPCS, serving_all

PER_RPC = 80


async def test_whatever_is_sent_is_answered_and_never_as_a_fault_of_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Tasks that earlier tests forgot are reported when they are collected: now, and not among the faults below.
    gc.collect()
    caplog.clear()
    outcomes: dict[str, Outcome] = {}
    async with serving_all(tmp_path) as addresses:
        for rpc in RPCS:
            async with create_channel(addresses[rpc.service]) as channel:
                outcomes[rpc.path] = await attack(channel, rpc, PER_RPC, seed=1)
    for path, outcome in outcomes.items():
        assert outcome.faults == [], path
        # Both kinds reached it: messages that it takes, and messages that it refuses.
        assert outcome.codes["OK"] and outcome.codes["INVALID_ARGUMENT"], path
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
