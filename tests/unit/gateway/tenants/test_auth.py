"""Whom a key lets in, with a store that a test fills and takes away."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from outrider.errors import OutriderError
from outrider.gateway.tenants import auth
from outrider.gateway.tenants.auth import KeyGuard, check_model
from outrider.metadata.tenants.tenants import FoundKey
from outrider.rpc.access.roles import INFER, Access
from outrider.rpc.v1 import tenants_pb2

_INFER = Access(scopes=frozenset({INFER}))
_ACME = tenants_pb2.Tenant(name="acme", models=["m"])


@dataclass
class Store:
    """Keys by what a client sends."""

    keys: dict[str, tenants_pb2.ApiKey] = field(default_factory=dict)
    required: bool = True
    away: bool = False
    num_reads: int = 0

    async def find(self, digest: bytes | None) -> FoundKey | None:
        self.num_reads += 1
        if self.away:
            return None
        for key in self.keys.values():
            if key.digest == digest:
                return FoundKey(self.required, key, _ACME)
        return FoundKey(self.required, None, None)

    def add(self, key: str, **fields: Any) -> None:
        given = {"scopes": [INFER], **fields}
        digest = hashlib.sha256(key.encode()).digest()
        self.keys[key] = tenants_pb2.ApiKey(id="key-1", tenant="acme", digest=digest, **given)


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guard(store: Store, clock: Clock) -> KeyGuard:
    return KeyGuard(cast(Any, store), clock=clock, wall_clock=clock)


async def reason(guard: KeyGuard, token: str, access: Access = _INFER) -> str | None:
    """Why it is refused; None where it is let in."""
    try:
        await guard.admit(access, token)
    except OutriderError as error:
        return error.reason
    return None


async def test_a_key_is_its_tenants(guard: KeyGuard, store: Store) -> None:
    store.add("k")
    caller = await guard.admit(_INFER, "k")
    assert (caller.name, caller.tenant) == ("key-1", _ACME)


async def test_a_door_that_was_closed_is_not_opened_by_a_store_that_forgot(
    guard: KeyGuard, store: Store, clock: Clock
) -> None:
    assert await reason(guard, "") == "API_KEY_MISSING"
    store.required = False
    clock.now_s += 10
    assert await reason(guard, "") == "API_KEY_MISSING"


async def test_a_key_is_asked_for_once_in_five_seconds_and_a_wrong_one_once_a_second(
    guard: KeyGuard, store: Store, clock: Clock
) -> None:
    store.add("k")
    await guard.admit(_INFER, "k")
    await reason(guard, "wrong")
    store.num_reads = 0
    clock.now_s += 0.9
    await guard.admit(_INFER, "k")
    await reason(guard, "wrong")
    assert store.num_reads == 0
    clock.now_s += 0.2
    await reason(guard, "wrong")
    assert store.num_reads == 1
    clock.now_s += 4
    await guard.admit(_INFER, "k")
    # The key, and whether keys are required.
    assert store.num_reads == 3


async def test_requests_that_wait_for_the_same_newer_answer_all_have_it(
    guard: KeyGuard, store: Store, clock: Clock
) -> None:
    store.add("k")
    await guard.admit(_INFER, "k")
    clock.now_s += 6
    callers = await asyncio.gather(*(guard.admit(_INFER, "k") for _ in range(5)))
    assert [caller.tenant.name for caller in callers] == ["acme"] * 5
    # Of the key, and of whether keys are required: once each time.
    assert store.num_reads == 4


async def test_a_revoked_key_opens_nothing_after_five_seconds(guard: KeyGuard, store: Store, clock: Clock) -> None:
    store.add("k")
    await guard.admit(_INFER, "k")
    del store.keys["k"]
    assert await reason(guard, "k") is None
    clock.now_s += 5
    assert await reason(guard, "k") == "INVALID_API_KEY"


async def test_without_the_store_a_known_key_holds_for_an_hour_and_no_other(
    guard: KeyGuard, store: Store, clock: Clock
) -> None:
    store.add("k")
    await guard.admit(_INFER, "k")
    store.away = True
    clock.now_s += 3599
    assert await reason(guard, "k") is None
    assert await reason(guard, "new") == "NO_METADATA"
    clock.now_s += 2
    assert await reason(guard, "k") == "NO_METADATA"


async def test_many_wrong_keys_push_no_real_one_out(
    guard: KeyGuard, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_MAX_KNOWN", 10)
    store.add("k")
    await guard.admit(_INFER, "k")
    for number in range(50):
        await reason(guard, f"wrong {number}")
    store.away = True
    assert await reason(guard, "k") is None


def test_a_tenant_may_ask_for_its_models_alone() -> None:
    check_model(_ACME, "m")
    check_model(tenants_pb2.Tenant(name="any"), "whatever")
    with pytest.raises(OutriderError) as caught:
        check_model(_ACME, "other")
    assert (caught.value.reason, caught.value.field) == ("MODEL_NOT_ALLOWED", "model")
