"""Many streams of mixed lengths at once, some left half way: everything is given back."""

from __future__ import annotations

import random

import pytest
from outrider_controller.cli.bench.streams import held_by, one_round, problems, settled
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.prompts import Prompt
from outrider_controller.cli.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

PROMPTS = [Prompt(str(i), "all", "word " * i) for i in (1, 7, 40, 90, 200)]


async def test_thirty_two_streams_end_and_leave_nothing_behind(stack: Stack, gateway: Gateway) -> None:
    rounds = []
    for number in range(2):
        ended = await one_round(gateway, stack.config.model, PROMPTS, 32, random.Random(number))
        assert (ended["complete"], ended["cancelled"], ended["errors"]) == (24, 8, [])
        rounds.append({**ended, "blocks_held": await settled(stack), "holds": await held_by(stack)})
    assert problems(rounds) == []
