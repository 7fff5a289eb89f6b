"""One run's world: hosts, network, store, processes and faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from outrider.gateway.routers.routers import RouterPool
from outrider_controller.router.config import FailoverConfig, LinkConfig, PolicyConfig, RouterConfig

from tests.simulation.hostility import DRAFT_PATH, TARGET_PATH, Hostility
from tests.simulation.network import Host, Network, Stream
from tests.simulation.processes import DraftProcess, Process, RouterProcess, TargetProcess, Worker
from tests.simulation.schedule import Fault, Kind, Role, Schedule
from tests.simulation.store import LEASE_TTL_S, SimulatedStore
from tests.simulation.witness import Texts, Witness

Note = Callable[[str], None]
WAIT_FOR_TARGET_S = 4.0
WAIT_FOR_RESTART_S = 8.0
_DRAIN_FLUSH_S = 0.2
# Most steps of a worker that one fault makes fail.
_MAX_FAILURES = 12
"""Enough for three steps of two rows, each with what the engine is checked with."""
_RESTARTS_AFTER_S = 0.5


class World:
    """Use with `async with`: everything that was started ends with the block."""

    def __init__(self, schedule: Schedule, note: Note | None) -> None:
        self.schedule = schedule
        self.rng = random.Random(f"world {schedule.seed}")
        self.texts = Texts(schedule.requests)
        self.witness = Witness(self.texts, note, _close_within_s(schedule))
        self.network = Network(self.rng, schedule.delay_s)
        self.hostility = Hostility(self.rng, self._hostile_share)
        self.network.tamper = self.hostility
        self.network.observe = self.witness
        self.store = SimulatedStore()
        self.config = _router_config(schedule, self.rng)
        self.gateway = Host("gateway-0")
        self.routers_known = RouterPool(
            self,
            asyncio.get_running_loop().time,
            partial(self.network.channel, self.gateway),  # type: ignore[arg-type]
        )
        self.places: dict[tuple[Role, int], Process] = {}
        self.gone: list[Process] = []
        self.befell: list[tuple[float, Fault]] = []
        self.counts: Counter[str] = Counter()
        self._note = note
        self._incarnations: Counter[tuple[Role, int]] = Counter()
        self._troubles: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> World:
        for index in range(len(self.schedule.targets)):
            await self._start(Role.TARGET, index)
        for index in range(len(self.schedule.drafts)):
            await self._start(Role.DRAFT, index)
        for index in range(self.schedule.num_routers):
            await self._start(Role.ROUTER, index)
        self._troubles = [asyncio.create_task(self._befall(fault)) for fault in self.schedule.faults]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._troubles:
            task.cancel()
        await self.routers_known.__aexit__()
        for process in self.places.values():
            await process.kill()
        await asyncio.gather(*self._troubles, return_exceptions=True)

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def log(self, line: str) -> None:
        if self._note is not None:
            self._note(line)

    async def addresses(self) -> list[str]:
        """Addresses of the routers with a lease: the gateway's RouterSource."""
        known = [p for p in (*self.gone, *self.places.values()) if isinstance(p, RouterProcess) and not p.draining]
        return [p.address for p in known if p.host.alive or self.now_s - p.troubled_until_s < LEASE_TTL_S]

    async def faults_over(self) -> None:
        """Returns when all faults have happened and ended, and every place is filled again."""
        await asyncio.gather(*self._troubles)
        # The death of a process that was cut off is noticed only after the cut.
        troubled = (*self.gone, *self.places.values())
        await asyncio.sleep(max(0.0, *(process.troubled_until_s - self.now_s for process in troubled)))
        for process in self.places.values():
            if isinstance(process, Worker):
                process.machine.failures_due = 0

    def processes(self, role: Role) -> list[Process]:
        return [process for (r, _), process in self.places.items() if r is role]

    # -- processes

    async def _start(self, role: Role, index: int) -> None:
        count = self._incarnations[role, index]
        self._incarnations[role, index] += 1
        name = f"{role.value}-{index}-{count}"
        # A supervisor may start the next one at the same address.
        host = count if self.rng.random() < 0.5 else 0
        address = f"{role.value}-{index}.{host}:7000"
        schedule = self.schedule
        process: Process
        if role is Role.TARGET:
            process = TargetProcess(name, address, self.network, self.store, schedule, schedule.targets[index])
        elif role is Role.DRAFT:
            process = DraftProcess(name, address, self.network, self.store, schedule, schedule.drafts[index])
        else:
            first_id = self.rng.getrandbits(60)
            process = RouterProcess(name, address, self.network, self.store, self.config, first_id)
            await process.start()
        if isinstance(process, Worker):
            process.on_broken = lambda: self._end(role, index)
        if (role, index) in self.places:
            self.gone.append(self.places[role, index])
        self.places[role, index] = process
        self.log(f"{name} starts at {address}")

    def _end(self, role: Role, index: int) -> None:
        """A worker whose engine fails whatever it is given ends itself."""
        self.counts[f"{role.value}: ends itself"] += 1
        fault = Fault(self.now_s, Kind.KILL, role, index, _RESTARTS_AFTER_S)
        self._troubles.append(asyncio.create_task(self._do(fault, self.places[role, index])))

    async def _replace(self, role: Role, index: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._start(role, index)

    # -- faults

    async def _befall(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        process = self.places[fault.role, fault.index]
        if fault.kind is Kind.STORE_AWAY:
            self.store.away_until_s = self.now_s + fault.for_s
        elif not process.host.alive or process.draining:
            return
        self.log(f"{process.host.name} {fault.kind.value} ({fault.for_s} s)")
        self.befell.append((self.now_s, fault))
        self.counts[f"{fault.role.value}: {fault.kind.value}"] += 1
        if fault.kind is not Kind.STORE_AWAY:
            process.trouble(self.now_s + fault.for_s)
        await self._do(fault, process)

    async def _do(self, fault: Fault, process: Process) -> None:
        now_s = self.now_s
        match fault.kind:
            case Kind.KILL:
                await process.kill()
                await self._replace(fault.role, fault.index, fault.for_s)
            case Kind.BREAK:
                self._break(process)
            case Kind.CUT_OFF:
                process.host.silent_until_s = max(process.host.silent_until_s, now_s + fault.for_s)
            case Kind.STALL if isinstance(process, Worker):
                process.stall(now_s + fault.for_s)
            case Kind.FAIL if isinstance(process, Worker):
                process.machine.failures_due += self.rng.choice((1, 2, _MAX_FAILURES))
            case Kind.DRAIN if isinstance(process, Worker):
                process.start_drain()
                await asyncio.sleep(fault.for_s)
                process.expire_drain()
                await asyncio.sleep(_DRAIN_FLUSH_S)
                await process.kill()
                await self._start(fault.role, fault.index)
            case Kind.REPLAY:
                self._break(process)
                await asyncio.sleep(fault.for_s)
                self._replay(process)

    def _break(self, process: Process) -> None:
        for stream in list(process.host.streams):
            stream.break_off("connection reset")

    def _replay(self, process: Process) -> None:
        place = process.host.name.rsplit("-", 1)[0]
        for stream in list(process.host.streams):
            if stream.path in (DRAFT_PATH, TARGET_PATH) and stream.server is process.host:
                self.witness.replaying = True
                for message in self.witness.past(place, stream.path, stream):
                    stream.inject(message)
                    self.counts["messages replayed"] += 1
                self.witness.replaying = False

    def _hostile_share(self, stream: Stream) -> float:
        # By address, not from the server: a stream may be used before its server is found.
        for (role, _), process in self.places.items():
            if role is Role.DRAFT and isinstance(process, Worker) and process.host is stream.server:
                return process.plan.hostile
        return 0.0


def _close_within_s(schedule: Schedule) -> float | None:
    """Time from the gateway's cancel to the target's last commit: two delays there, one back, and the running steps."""
    if any(fault.kind in (Kind.CUT_OFF, Kind.STALL) for fault in schedule.faults):
        return None
    longest_step_s = max(plan.step_s + plan.token_s * plan.max_batch_tokens for plan in schedule.targets)
    # A failed step is run again in two halves.
    failures = sum(_MAX_FAILURES for f in schedule.faults if f.kind is Kind.FAIL and f.role is Role.TARGET)
    longest_step_s *= 1 + 2 * failures
    return 3 * schedule.delay_s[1] + 3 * longest_step_s


def _router_config(schedule: Schedule, rng: random.Random) -> RouterConfig:
    return RouterConfig(
        refresh_s=0.3,
        policy=PolicyConfig(max_draft_tokens=schedule.max_draft_tokens, max_wait_us=schedule.max_wait_us),
        failover=FailoverConfig(
            wait_for_target_s=WAIT_FOR_TARGET_S,
            wait_for_restart_s=WAIT_FOR_RESTART_S,
            draft_backoff_s=0.1,
            stall_after_s=0.4,
            probe_timeout_s=0.3,
            max_silence_s=rng.choice((1.5, 120.0)),
        ),
        link=LinkConfig(connect_timeout_s=1.0, first_backoff_s=0.05, max_backoff_s=0.5),
    )
