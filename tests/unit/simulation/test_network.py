"""The simulated network, where no simulation of ours would find its own faults."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.simulation.network import Channel, Host, Network


def test_a_close_that_is_cancelled_leaves_no_task_behind() -> None:
    async def scenario() -> set[str]:
        client = Host("client")
        channel = Channel(Network(random.Random(0), (0.001, 0.002)), client, "nobody")
        # Nothing answers within the grace that the close gives it.
        client.silent_until_s = asyncio.get_running_loop().time() + 60
        channel.stream_stream("/service/method", response_deserializer=bytes)()
        closing = asyncio.create_task(channel.close(grace=30))
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await asyncio.sleep(0)
        own = {asyncio.current_task(), *client.tasks}
        return {repr(task) for task in asyncio.all_tasks() - own}

    assert asyncio.run(scenario()) == set()
