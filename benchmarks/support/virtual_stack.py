"""The shipped router with paced targets, in virtual time: effects of admission and batching, without those of the CPU.

There is no gateway: each tenant sends at its quota's rate, and refused requests cost nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress

from outrider.errors import Overloaded
from outrider.gateway.routers.router_stream import RouterStream
from outrider.rpc.v1 import router_pb2, router_pb2_grpc, target_pb2_grpc
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.router.config import AdmissionConfig, RouterConfig

from benchmarks.support.caching_target import CachingTarget
from benchmarks.support.open_loop import ANSWER_TOKENS, PROMPT_TOKENS
from benchmarks.support.paced_fleet import MODEL, PACE
from tests.simulation.network import Host, Network
from tests.simulation.processes import RouterProcess
from tests.simulation.store import SimulatedStore
from tests.simulation.virtual_time import VirtualLoop, run_virtually

# Delay of one direction, as on loopback.
_DELAY_S = (0.0001, 0.0005)
_SETTLE_S = 5.0


def first_tokens_s(rates: Mapping[str, float], seconds: float, *, targets: int, places: int) -> dict[str, list[float]]:
    """By tenant: the times to first token. `rates`: requests per second of each tenant, at random times."""
    return run_virtually(_first_tokens_s(rates, seconds, targets, places), VirtualLoop())


async def _first_tokens_s(
    rates: Mapping[str, float], seconds: float, num_targets: int, places: int
) -> dict[str, list[float]]:
    network, store = Network(random.Random(0), _DELAY_S), SimulatedStore()
    for number in range(num_targets):
        target, host = CachingTarget(PACE, _unpublished, model=MODEL, max_sequences=places), Host(f"target-{number}")
        address = f"{host.name}:1"
        target_pb2_grpc.add_TargetServiceServicer_to_server(target, network.listen(host, address))
        store.register(host, target.info, address, lambda it=target: it.load)  # type: ignore[misc]
    router = RouterProcess("router", "router:1", network, store, RouterConfig(admission=AdmissionConfig()), 1)
    await router.start()
    stub = router_pb2_grpc.RouterServiceStub(network.channel(Host("gateway"), router.address))  # type: ignore[call-overload]
    stream = RouterStream(stub)
    await router.dispatcher.fleet.ready(10.0)
    found: dict[str, list[float]] = {tenant: [] for tenant in rates}
    await asyncio.gather(*(_asks(stream, tenant, rate, seconds, found[tenant]) for tenant, rate in rates.items()))
    await stream.close()
    await router.kill()
    return found


async def _asks(stream: RouterStream, tenant: str, rate: float, seconds: float, found: list[float]) -> None:
    chance, now_s = random.Random(tenant), asyncio.get_running_loop().time
    due_s, since_s = now_s(), now_s() + _SETTLE_S
    tasks = []
    while (due_s := due_s + chance.expovariate(rate)) < since_s + seconds:
        await asyncio.sleep(due_s - now_s())
        tasks.append(asyncio.create_task(_ask(stream, tenant, chance, found if due_s > since_s else [])))
    await asyncio.gather(*tasks)


async def _ask(stream: RouterStream, tenant: str, chance: random.Random, found: list[float]) -> None:
    request = router_pb2.RouteRequest(
        request_id="virtual",
        tenant=tenant,
        model=MODEL,
        prompt_token_ids=[chance.randrange(3, 60_000) for _ in range(PROMPT_TOKENS)],
        sampling=sequence.Sampling(top_p=1),
        stopping=sequence.Stopping(max_new_tokens=ANSWER_TOKENS),
        speculation=router_pb2.SPECULATION_MODE_OFF,
    )
    asked_s, first_s = asyncio.get_running_loop().time(), None
    with suppress(Overloaded):
        async for response in stream.route(request, 60.0):
            if first_s is None and response.token_ids:
                first_s = asyncio.get_running_loop().time() - asked_s
                found.append(first_s)


def _unpublished(hashes: Sequence[bytes]) -> None:
    """Prefixes are not published: nothing is placed by prefix here."""
