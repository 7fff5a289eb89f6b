"""Which router takes the next request."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import pytest
from outrider.gateway.routers.routers import FixedRouters, LeasedRouters, Rotation, RouterPool
from outrider.metadata import LeaseRecord
from outrider.protocol.identity import SPOKEN
from outrider.rpc.channel import create_channel
from outrider.rpc.v1 import worker_pb2


def test_requests_go_round() -> None:
    rotation = Rotation()
    assert sorted(rotation.choose(["a", "b", "c"], 0.0) or "" for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]


def test_each_tenant_goes_round_by_itself() -> None:
    """Two that ask in turns would else have a router each."""
    rotation = Rotation()
    asked = [(tenant, rotation.choose(["a", "b"], 0.0, tenant)) for tenant in ("one", "other") * 10]
    assert Counter(asked) == dict.fromkeys([(tenant, router) for tenant in ("one", "other") for router in "ab"], 5)


def test_a_router_that_failed_is_left_out_until_its_time_is_over() -> None:
    rotation = Rotation(cooldown_s=2.0)
    rotation.failed("a", 10.0)
    assert {rotation.choose(["a", "b"], 11.9) for _ in range(4)} == {"b"}
    assert {rotation.choose(["a", "b"], 12.0) for _ in range(4)} == {"a", "b"}


def test_a_router_that_answers_is_back_at_once() -> None:
    rotation = Rotation()
    rotation.failed("a", 0.0)
    rotation.recovered("a")
    assert {rotation.choose(["a", "b"], 0.1) for _ in range(4)} == {"a", "b"}


def test_when_all_failed_the_one_that_failed_first_is_tried() -> None:
    rotation = Rotation()
    rotation.failed("b", 0.0)
    rotation.failed("a", 1.0)
    assert rotation.choose(["a", "b"], 1.1) == "b"


def test_without_addresses_there_is_no_router() -> None:
    assert Rotation().choose([], 0.0) is None


@dataclass
class Store:
    """Leases of routers, with the versions that each speaks."""

    versions: dict[str, tuple[int, int]]

    async def workers(self, role: worker_pb2.WorkerRole.ValueType) -> list[LeaseRecord]:
        return [
            LeaseRecord(
                worker_pb2.WorkerInfo(role=role, worker_id=name, min_protocol_version=oldest, protocol_version=newest),
                worker_pb2.WorkerLoad(),
                f"{name}:1",
                1,
            )
            for name, (oldest, newest) in self.versions.items()
        ]


async def test_a_router_whose_versions_are_not_spoken_here_is_left_alone_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    newest = SPOKEN.newest
    versions = {"before": (0, newest), "after": (newest, newest + 1), "strange": (newest + 1, newest + 2)}
    routers = LeasedRouters(cast(Any, Store(versions)), max_age_s=0.0)
    for _ in range(3):
        assert await routers.addresses() == ["before:1", "after:1"]
        await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        f"a router is not used: protocol_version: {SPOKEN} is spoken here, {newest + 1} to {newest + 2} by strange"
    ]


async def test_with_another_certificate_each_router_is_connected_to_anew_and_its_calls_end_in_peace() -> None:
    version: list[tuple[tuple[int, int], ...]] = [((1, 1),)]
    source = FixedRouters(("127.0.0.1:1",))
    async with RouterPool(source, connect=create_channel, certificate=lambda: version[0]) as pool:
        first = await pool.pick()
        assert await pool.pick() is first
        version[0] = ((2, 2),)
        second = await pool.pick()
        assert second is not first and second.certificate == version[0]
        assert await pool.pick() is second
        await asyncio.gather(*pool._closing)
