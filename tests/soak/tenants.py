"""python -m tests.soak tenants: do gateways together keep to a quota, and does a wrong key's time tell nothing?

Three quota keepers, each with a connection of its own to a real Redis, and clients that ask as soon as they may. One
keeper is lost at half time; then Redis is. Wrong keys of two kinds take turns at a real key guard.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import click
from outrider.errors import OutriderError, Overloaded
from outrider.gateway.tenants.auth import KeyGuard
from outrider.gateway.tenants.quota_keeper import QuotaKeeper
from outrider.gateway.tenants.quotas import Rate
from outrider.metadata import MetadataStore
from outrider.rpc.access.roles import INFER, Access
from outrider.rpc.v1 import tenants_pb2
from outrider_controller.cli.exits import ExitCode
from scipy import stats

from benchmarks.support.redis_server import EmbeddedServer

_GATEWAYS, _CLIENTS = 3, 16
_REQUESTS_PER_SECOND, _TOKENS_PER_REQUEST, _TOKENS_PER_MINUTE = 40.0, 90, 120_000
_QUOTAS = {
    "requests": tenants_pb2.Quota(requests_per_second=_REQUESTS_PER_SECOND),
    "tokens": tenants_pb2.Quota(tokens_per_minute=_TOKENS_PER_MINUTE),
}
_MAX_T = 4.5


@click.command("tenants")
@click.option("--seconds", type=click.IntRange(5), default=60, show_default=True, help="Of each quota.")
@click.option("--away", type=click.IntRange(5), default=20, show_default=True, help="Seconds without Redis.")
@click.option("--keys", type=click.IntRange(100), default=10_000, show_default=True, help="Wrong keys of each kind.")
def tenants(seconds: int, away: int, keys: int) -> int:
    """Quotas over three gateways, with one lost and with Redis lost; the time that wrong keys take."""
    return asyncio.run(_run(seconds, away, keys))


async def _run(seconds: int, away: int, keys: int) -> int:
    with tempfile.TemporaryDirectory() as scratch, EmbeddedServer.start(Path(scratch)) as server:
        t = await _key_times(server.url, keys)
        holds = abs(t) < _MAX_T
        click.echo(f"time of wrong keys, like a real one against random: t = {t:+.2f} over {keys} of each")
        async with _gateways(server.url) as gateways:
            shares = await asyncio.gather(*(_share(gateways, name, seconds, lose_one=True) for name in _QUOTAS))
            for name, share in zip(_QUOTAS, shares, strict=True):
                click.echo(f"{name} in {seconds} s, one of {_GATEWAYS} gateways lost: {share:.1%} of the quota")
                holds &= abs(share - 1) <= 0.02
            server.stop()
            left = gateways[1:]
            for one in left:
                # As leases told them before.
                one.num_gateways = len(left)
            shares = await asyncio.gather(*(_share(left, name, away, lose_one=False) for name in _QUOTAS))
            for name, share in zip(_QUOTAS, shares, strict=True):
                click.echo(f"{name} in {away} s without Redis: {share:.1%} of the quota")
                holds &= share <= 1.2
    return ExitCode.OK if holds else ExitCode.ERROR


@contextlib.asynccontextmanager
async def _gateways(url: str) -> AsyncIterator[list[QuotaKeeper]]:
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(MetadataStore.connect(url)) for _ in range(_GATEWAYS)]
        yield [QuotaKeeper(store, f"gateway-{number}") for number, store in enumerate(stores)]


async def _share(gateways: list[QuotaKeeper], name: str, seconds: float, *, lose_one: bool) -> float:
    """What was let in, of what the quota allows. Clients of the first phase find a full bucket, those of the second an
    empty one."""
    who = tenants_pb2.Tenant(name=name, quota=_QUOTAS[name])
    started_s = time.monotonic()
    let_in = [0]

    def up() -> list[QuotaKeeper]:
        return gateways[1:] if lose_one and time.monotonic() - started_s > seconds / 2 else gateways

    clients = (_client(number, up, who, started_s + seconds, let_in) for number in range(_CLIENTS))
    await asyncio.gather(*clients)
    rate = Rate.of_requests(who.quota) if name == "requests" else Rate.of_tokens(who.quota)
    price = 1 if name == "requests" else _TOKENS_PER_REQUEST
    return let_in[0] * price / (rate.rate * seconds + (rate.capacity if lose_one else 0))


async def _client(
    number: int, up: Callable[[], list[QuotaKeeper]], who: tenants_pb2.Tenant, end_s: float, let_in: list[int]
) -> None:
    turn = number
    while time.monotonic() < end_s:
        turn += 1
        try:
            async with up()[turn % len(up())].held(who, 30, 4096) as charge:
                let_in[0] += 1
                await asyncio.sleep(0.01)
                charge.ended(30, _TOKENS_PER_REQUEST - 30)
        except Overloaded as refused:
            await asyncio.sleep(min(refused.retry_after_s or 0.0, 0.2))


async def _key_times(url: str, keys: int) -> float:
    """Welch's t between keys that begin like a real one and keys that are random; which comes first alternates. None
    is asked twice: the guard remembers wrong keys for a while."""
    real = "ork-" + secrets.token_urlsafe(32)
    async with MetadataStore.connect(url) as store:
        digest = hashlib.sha256(real.encode()).digest()
        key = tenants_pb2.ApiKey(id="key-1", tenant="default", scopes=[INFER], digest=digest)
        await store.tenants.add_key(key, by="soak")
        guard = KeyGuard(store.tenants)
        await guard.admit(Access(scopes=frozenset({INFER})), real)
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(keys):
            wrong = real[:-12] + secrets.token_hex(6), secrets.token_urlsafe(35)[: len(real)]
            for kind in (0, 1) if number % 2 else (1, 0):
                times[kind].append(await _time_of(guard, wrong[kind]))
    return float(stats.ttest_ind(*times, equal_var=False).statistic)


async def _time_of(guard: KeyGuard, key: str) -> float:
    started_s = time.perf_counter()
    with contextlib.suppress(OutriderError):
        await guard.admit(Access(scopes=frozenset({INFER})), key)
    return time.perf_counter() - started_s
