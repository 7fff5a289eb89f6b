"""`outrider up` as a user runs it: killed in parts under load, and twice on one machine."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from outrider_controller.cli.client import Gateway
from outrider_controller.cli.clusters.control import list_workers
from outrider_controller.control.api.rows import worker_rows

from benchmarks.support.asking import make_request
from tests.soak.kill_pairs import Blow, Up, all_blows, run_blows, running_stack

pytestmark = pytest.mark.timeout(600)


# All pairs take most of an hour: python -m tests.soak kill-pairs. Of these, one stayed away for good, one for minutes.
async def test_a_stack_is_served_again_whatever_is_killed(tiny: Path) -> None:
    blows = [Blow(("redis", "target")), Blow(("gateway", "controller")), Blow(("raylet",))]
    outcomes = await run_blows(str(tiny), blows, streams=8, max_tokens=64, seed=0)
    assert [(one.killed, one.holds) for one in outcomes] == [(blow.name, True) for blow in blows]


async def test_two_stacks_side_by_side_do_not_disturb_each_other(tiny: Path, tmp_path: Path) -> None:
    async def workers(up: Up) -> set[str]:
        listed = await list_workers(up.described["control"], token=up.token)
        return {row["id"] for row in worker_rows(listed.workers)}

    async def answers(up: Up) -> int:
        async with Gateway(up.described["grpc"]) as gateway:
            request = make_request(up.described["model"], "Hello", "auto", max_tokens=8, ignore_eos=True)
            return len((await gateway.answer(request, 60)).token_ids)

    cache = tmp_path / "cache"
    async with running_stack(str(tiny), tmp_path / "one", cache) as one:
        async with running_stack(str(tiny), tmp_path / "two", cache) as two:
            assert (one.described["context"], two.described["context"]) == ("default", "default-2")
            assert not await workers(one) & await workers(two)
            assert [await answers(one), await answers(two)] == [8, 8]
            family = psutil.Process(two.process.pid).children(recursive=True)
            two.process.send_signal(signal.SIGTERM)
            assert await two.process.wait() == 0
            assert psutil.wait_procs(family, timeout=10)[1] == []
        assert await answers(one) == 8
        assert [file.name for file in (cache / "contexts").iterdir()] == ["default.json"]


def test_every_kind_is_killed_alone_and_with_every_other() -> None:
    names = {blow.name for blow in all_blows()}
    assert {"redis", "target", "target + target", "redis + target", "gateway + controller"} <= names
    assert len(names) == len(all_blows()) == 9 + 36 + 3
    assert Blow(("target", "router")).leaves_one_of_each
    assert not Blow(("target", "target")).leaves_one_of_each
    assert not Blow(("redis", "controller")).leaves_one_of_each
