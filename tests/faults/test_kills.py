"""SIGKILL in mid-stream: the client sees no error, and the text it would have seen anyway."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_controller.cli.bench.faults import MODES, disturbed
from outrider_controller.cli.bench.runs import make_request
from outrider_controller.cli.client import SPECULATION_MODES, Gateway
from outrider_controller.cli.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_killed_worker_changes_no_token(stack: Stack, gateway: Gateway, mode: str, role: str) -> None:
    options: dict[str, Any] = MODES[mode]
    request = make_request(stack.config.model, "Once upon a time", "off", max_tokens=2500, ignore_eos=True, **options)
    plain = await gateway.answer(request)
    assert len(plain.token_ids) == 2500
    request.options.speculation = SPECULATION_MODES["on"]
    outcome = await disturbed(stack, gateway, request, role, mode, plain)
    assert outcome.error == "" and outcome.equal
    assert outcome.tokens_after > 100
    assert outcome.failovers >= (role == "target")
