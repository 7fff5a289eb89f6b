"""Mutated messages to every internal RPC of real services, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.rpc_fuzz import measure, services_process, undisturbed
from tests.soak.rpc_services import ALL, RPCS

_WITHOUT = 1 << 20
# Steps of ever new shapes and requests whose traces are kept: it flattens, and Python's own heap does not grow.
_WITH_A_MODEL = 24 << 20

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(1800)]


@pytest.mark.parametrize("num_messages", [10_000])
async def test_no_message_is_answered_as_a_fault_of_the_server_or_remembered(tmp_path: Path, num_messages: int) -> None:
    log_path = tmp_path / "log"
    async with (
        services_process(log_path) as (addresses, process),
        undisturbed(addresses["RouterService"]) as answers,
    ):
        for rpc in ALL:
            slope = await measure(addresses, process, rpc, num_messages if rpc.streams else num_messages // 10, seed=1)
            assert slope.outcome.faults == [], rpc.path
            if rpc in RPCS:
                assert slope.grown_bytes < (_WITH_A_MODEL if rpc.runs_model else _WITHOUT), rpc.path
        assert process.is_running()
    assert all(tokens == answers[0] != [] for tokens in answers)
    # A line for every message would be ten times as much.
    assert log_path.stat().st_size < 1 << 20
