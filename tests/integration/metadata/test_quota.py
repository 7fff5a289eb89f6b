"""The script behind quotas, on a real server with its own clock."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from outrider.metadata import MetadataStore
from outrider.metadata.tenants.quota import Granted, QuotaRequest

NONE = QuotaRequest(0, 0, 0)


async def take(
    store: MetadataStore, requests: QuotaRequest = NONE, tokens: QuotaRequest = NONE, **more: int | str
) -> Granted:
    given = {"price": 0, "gateway": "a", "running": 1, "most_running": 0, **more}
    granted = await store.quotas.take("t", requests, tokens, **given)  # type: ignore[arg-type]
    assert granted is not None
    return granted


async def test_two_gateways_empty_one_bucket(store: MetadataStore, reader: MetadataStore) -> None:
    wanted = QuotaRequest(rate=0.001, capacity=10, amount=6)
    assert (await take(store, wanted)).requests == 6
    second = await take(reader, wanted, gateway="b")
    assert second.requests == 4 and second.requests_left < 1


async def test_what_is_given_out_over_time_is_the_rate(store: MetadataStore) -> None:
    rate, given = 200.0, 0.0
    wanted = QuotaRequest(rate=rate, capacity=20, amount=1000)
    first_s = time.monotonic()
    await take(store, tokens=wanted)
    asked_s = started_s = answered_s = time.monotonic()
    while asked_s - started_s < 0.5:
        await asyncio.sleep(0.02)
        asked_s = time.monotonic()
        given += (await take(store, tokens=wanted)).tokens
        answered_s = time.monotonic()
    # The server's time of the first call and of the last lies within these.
    assert 0.95 * rate * (asked_s - started_s) < given < 1.05 * rate * (answered_s - first_s)


async def test_a_price_beyond_the_bucket_is_taken_whole_and_paid_off_by_time(store: MetadataStore) -> None:
    wanted = QuotaRequest(rate=100, capacity=5, amount=20)
    assert (await take(store, tokens=wanted, price=20)).tokens == 20
    refused = await take(store, tokens=wanted, price=1)
    assert refused.tokens == 0 and -15 <= refused.tokens_left < 0
    await asyncio.sleep(0.2)
    assert (await take(store, tokens=wanted, price=1)).tokens >= 1


async def test_places_are_counted_over_gateways_and_come_back(store: MetadataStore) -> None:
    assert (await take(store, most_running=2)).place
    assert (await take(store, most_running=2, gateway="b")).place
    assert not (await take(store, most_running=2, running=2)).place
    await store.quotas.report_running("b", {"t": 0})
    assert (await take(store, most_running=2, running=2)).place


async def test_requests_beyond_the_bucket_are_taken_whole_and_paid_off_by_time(store: MetadataStore) -> None:
    wanted = QuotaRequest(rate=20, capacity=2, amount=5)
    assert (await take(store, wanted, num_requests=5)).requests == 5
    refused = await take(store, wanted, num_requests=1)
    assert refused.requests == 0 and -3 <= refused.requests_left < 1
    await asyncio.sleep(0.25)
    assert (await take(store, wanted, num_requests=1)).requests >= 1


async def test_a_request_without_tokens_leaves_no_debt_of_requests(store: MetadataStore) -> None:
    requests, tokens = QuotaRequest(rate=0.001, capacity=2, amount=0), QuotaRequest(rate=0.001, capacity=5, amount=0)
    assert (await take(store, requests, tokens, price=20)).tokens == 20
    refused = await take(store, requests, tokens, num_requests=50, price=20)
    assert (refused.requests, refused.tokens) == (0, 0)
    assert refused.requests_left == pytest.approx(2, abs=0.1)
    assert (await take(store, requests, tokens, num_requests=50)).requests == 50


async def test_what_comes_back_is_kept_where_no_place_is_free(store: MetadataStore) -> None:
    wanted = QuotaRequest(rate=0.001, capacity=5, amount=20)
    assert (await take(store, tokens=wanted, price=20)).tokens == 20
    back = replace(wanted, back=20)
    refused = await take(store, tokens=back, price=1, running=2, most_running=1)
    assert not refused.place and refused.tokens == 0
    assert (await take(store, tokens=wanted, price=1)).tokens == pytest.approx(5, abs=0.1)


async def test_while_the_store_is_away_nothing_is_said(tmp_path: object) -> None:
    async with MetadataStore.connect(f"unix://{tmp_path}/absent.sock") as store:
        taken = await store.quotas.take("t", NONE, NONE, price=0, gateway="a", running=1, most_running=0)
        assert taken is None
