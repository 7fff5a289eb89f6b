"""Whole stacks disturbed: workers killed in mid-stream, many streams at once. The client notices nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.up.stack import Stack

from benchmarks.support.asking import make_request
from tests.soak.faults import MODES, Blow, disturbed, hangs, stopped

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


@pytest.mark.parametrize("blow", ["SIGSTOP", "hanging step"])
async def test_a_target_that_makes_no_step_loses_its_sequences_to_another(
    stack: Stack, gateway: Gateway, hanging_file: Path, blow: str
) -> None:
    options: dict[str, Any] = MODES["greedy"]
    request = make_request(stack.config.model, "Once upon a time", "off", max_tokens=2500, ignore_eos=True, **options)
    plain = await gateway.answer(request)
    blows: dict[str, Blow] = {"SIGSTOP": stopped, "hanging step": partial(hangs, hanging_file)}
    outcome = await disturbed(stack, gateway, request, "target", "greedy", plain, blow, blows[blow])
    assert outcome.error == "" and outcome.equal
    assert outcome.failovers >= 1 and outcome.tokens_after > 100
    # 3 s on a machine that does nothing else, and that the hanging step may take 1 s.
    assert outcome.pause_ms < 9000
