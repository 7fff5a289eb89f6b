"""The schedule of one run, drawn from a seed. Pure: equal seeds give equal schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from outrider.rpc.v1 import router_pb2

from tests.simulation.hash_model import VOCAB_SIZE


class Kind(Enum):
    """The kind of a fault of a process or its network."""

    KILL = "dies, and comes back as a new one"
    BREAK = "loses its streams"
    CUT_OFF = "is not reached for a while"
    STALL = "does nothing for a while"
    FAIL = "fails in its next step"
    DRAIN = "is told to leave, and comes back as a new one"
    REPLAY = "hears the past again"
    STORE_AWAY = "the metadata store is away for a while"


class Role(Enum):
    TARGET = "target"
    DRAFT = "draft"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: Kind
    role: Role
    index: int
    for_s: float


@dataclass(frozen=True, slots=True)
class RequestPlan:
    number: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_k: int
    seed: int | None
    stop_token_ids: tuple[int, ...]
    speculation: router_pb2.SpeculationMode.ValueType
    max_draft_tokens: int | None
    timeout_s: float
    cancel_after_tokens: int | None = None
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One place in the fleet; a process that replaces a dead one has the same plan."""

    step_s: float
    token_s: float
    num_blocks: int
    max_sequences: int
    max_batch_tokens: int = 64
    max_context_len: int = 128
    accuracy: float = 1.0
    hostile: float = 0.0
    """Share of its messages that are lost, repeated, delayed or forged."""


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    delay_s: tuple[float, float]
    targets: tuple[WorkerPlan, ...]
    drafts: tuple[WorkerPlan, ...]
    num_routers: int
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    max_wait_us: int
    max_draft_tokens: int
    block_size: int = field(default=4)


_AUTO, _ON, _OFF = router_pb2.SPECULATION_MODE_AUTO, router_pb2.SPECULATION_MODE_ON, router_pb2.SPECULATION_MODE_OFF
_SPECULATION = (_AUTO,) * 4 + (_ON,) * 3 + (_OFF,)


def draw(seed: int) -> Schedule:
    """The schedule of this seed."""
    rng = random.Random(f"outrider simulation {seed}")
    shared = _tokens(rng, rng.randint(4, 14))
    requests = tuple(_request(rng, number, shared) for number in range(rng.randint(2, 6)))
    targets = tuple(_target(rng) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    drafts = tuple(_draft(rng) for _ in range(rng.choice((0, 1, 1, 2, 2, 3))))
    num_routers = rng.choice((1, 1, 2))
    calm = rng.random() < 0.1
    faults = () if calm else _faults(rng, len(targets), len(drafts), num_routers)
    return Schedule(
        seed=seed,
        delay_s=rng.choice(((0.0001, 0.001), (0.0001, 0.001), (0.0005, 0.01), (0.001, 0.08))),
        targets=targets,
        drafts=drafts,
        num_routers=num_routers,
        requests=requests,
        faults=faults,
        max_wait_us=rng.choice((0, 5_000, 50_000)),
        max_draft_tokens=rng.choice((1, 3, 5, 8)),
    )


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(count))


def _request(rng: random.Random, number: int, shared: tuple[int, ...]) -> RequestPlan:
    prompt = _tokens(rng, rng.randint(1, 12))
    if rng.random() < 0.5:
        prompt = (*shared, *prompt)
    # Coupled with a seed. Without one the router chooses the mode, and only one token can be drawn ("top"), so that all
    # modes have the same right answer.
    style = rng.choice(("greedy", "greedy", "top", "coupled"))
    cancelled = rng.random()
    return RequestPlan(
        number=number,
        at_s=rng.choice((0.0, 0.0, rng.uniform(0, 0.5))),
        prompt=prompt,
        max_tokens=rng.choice((1, 2, 8, 16, 28, 28, 28)),
        # Exact in 32 bits, as in the message.
        temperature=0.0 if style == "greedy" else 1.5,
        top_k=1 if style == "top" else 0,
        seed=rng.getrandbits(32) if style == "coupled" else None,
        stop_token_ids=_tokens(rng, 3) if rng.random() < 0.3 else (),
        speculation=rng.choice(_SPECULATION),
        max_draft_tokens=rng.choice((None, None, None, None, None, 0, 1, 4, 16)),
        timeout_s=rng.choice((60.0, 60.0, 60.0, 60.0, rng.uniform(0.05, 2.0))),
        cancel_after_tokens=rng.randint(1, 8) if cancelled < 0.15 else None,
        cancel_after_s=rng.uniform(0.0, 0.6) if 0.15 <= cancelled < 0.3 else None,
    )


def _target(rng: random.Random) -> WorkerPlan:
    return WorkerPlan(
        step_s=rng.choice((0.01, 0.02, 0.05)),
        token_s=0.0001,
        # The longest request needs 14 blocks. With few more, sequences are preempted.
        num_blocks=rng.choice((14, 14, 20, 60)),
        max_sequences=rng.choice((2, 16, 16)),
        max_batch_tokens=rng.choice((16, 64)),
        max_context_len=rng.choice((56, 128)),
    )


def _draft(rng: random.Random) -> WorkerPlan:
    return WorkerPlan(
        step_s=rng.choice((0.0003, 0.001, 0.004, 0.015)),
        token_s=0.00005,
        num_blocks=rng.choice((6, 20, 80)),
        max_sequences=rng.choice((2, 16)),
        max_batch_tokens=rng.choice((16, 64)),
        max_context_len=rng.choice((24, 128, 128)),
        accuracy=rng.choice((0.3, 0.8, 0.95, 1.0)),
        hostile=rng.choice((0.0, 0.0, 0.0, 0.1, 0.4)),
    )


def _faults(rng: random.Random, num_targets: int, num_drafts: int, num_routers: int) -> tuple[Fault, ...]:
    roles = [Role.TARGET] * 4 + [Role.DRAFT] * (4 if num_drafts else 0) + [Role.ROUTER] * 2
    counts = {Role.TARGET: num_targets, Role.DRAFT: num_drafts, Role.ROUTER: num_routers}
    worker_kinds = [k for k in Kind if k is not Kind.STORE_AWAY] + [Kind.KILL, Kind.BREAK]
    router_kinds = [Kind.KILL, Kind.BREAK, Kind.CUT_OFF, Kind.STORE_AWAY]
    faults = []
    for _ in range(rng.choice((1, 2, 3, 4, 6))):
        role = rng.choice(roles)
        kind = rng.choice(router_kinds if role is Role.ROUTER else worker_kinds)
        index, for_s = rng.randrange(counts[role]), rng.choice((0.02, 0.2, 0.6, 2.0))
        faults.append(Fault(rng.uniform(0, 0.8), kind, role, index, for_s))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
