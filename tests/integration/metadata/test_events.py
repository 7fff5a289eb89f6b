from __future__ import annotations

import pytest
import redis
from outrider.metadata import MetadataStore


async def test_events_come_in_order_and_can_be_read_on_from_the_last(
    store: MetadataStore, reader: MetadataStore
) -> None:
    for i in range(5):
        await store.emit("fallback", {"reason": "draft_lost", "i": i, "rate": 0.5, "hard": True})
    events = await reader.events(limit=3)
    rest = await reader.events(since=events[-1].id)
    assert [event.fields["i"] for event in (*events, *rest)] == ["0", "1", "2", "3", "4"]
    assert events[0].kind == "fallback"
    assert events[0].fields == {"reason": "draft_lost", "i": "0", "rate": "0.5", "hard": "True"}
    assert await reader.events(since=rest[-1].id) == []


async def test_the_stream_is_capped_and_long_values_are_cut(store: MetadataStore, raw: redis.Redis) -> None:
    pipe = raw.pipeline(transaction=False)
    for _ in range(10_500):
        pipe.xadd("outrider:events", {"_kind": "old"})
    pipe.execute()
    await store.emit("fallback", {"what": "x" * 10_000})
    assert raw.xlen("outrider:events") < 10_500
    [(_, last)] = raw.xrevrange("outrider:events", count=1)
    assert len(last[b"what"]) == 500


async def test_an_event_of_nobody_we_know_is_left_out_and_counted(store: MetadataStore, raw: redis.Redis) -> None:
    raw.xadd("outrider:events", {b"\xff": b"\xff"})
    raw.xadd("outrider:events", {"no": "kind"})
    await store.emit("alert", {})
    assert [event.kind for event in await store.events()] == ["alert"]
    assert store.counters.num_malformed == 2


@pytest.mark.parametrize("kind", ["", "Fallback", "a b", "x" * 100])
async def test_a_kind_that_is_no_name_is_refused(store: MetadataStore, kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        await store.emit(kind, {})


@pytest.mark.parametrize("since", ["", "-", "yesterday", "1-1)"])
async def test_a_position_that_is_none_is_refused(store: MetadataStore, since: str) -> None:
    with pytest.raises(ValueError, match="since"):
        await store.events(since=since)
