"""Mutated messages to every internal RPC of real services, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.rpc_fuzz import measure, services_process, undisturbed
from tests.soak.rpc_services import ALL

_WITHOUT = 1 << 20
# Steps of ever new shapes, and requests whose traces are kept.
_WITH_A_MODEL = 8 << 20

pytestmark = [pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(1800)]


@pytest.mark.parametrize("num_messages", [10_000])
async def test_no_message_is_answered_as_a_fault_of_the_server_or_remembered(tmp_path: Path, num_messages: int) -> None:
    log_path = tmp_path / "log"
    async with (
        services_process(log_path) as services,
        undisturbed(services.addresses["RouterService"]) as answers,
    ):
        for rpc in ALL:
            allowed_bytes = _WITH_A_MODEL if rpc.runs_model else _WITHOUT
            number = num_messages if rpc.streams else num_messages // 10
            slope = await measure(services, rpc, number, seed=1, allowed_bytes=allowed_bytes)
            print(f"{rpc.path} {slope.outcome.num_messages}: {slope.grown_bytes / 1024:+.0f} KiB")
            assert slope.outcome.faults == [], rpc.path
            # Of what routers have seen, the plan keeps a sum for each tenant.
            assert slope.grown_bytes < allowed_bytes or rpc.method == "Follow", rpc.path
        assert services.process.returncode is None
    assert all(tokens == answers[0] != [] for tokens in answers)
    # A line for every message would be ten times as much.
    assert log_path.stat().st_size < 1 << 20
