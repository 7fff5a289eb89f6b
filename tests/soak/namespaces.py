"""python -m tests.soak namespaces: does the cluster need the connections that are documented, and no other?

Every role is alone in a network namespace that lets through what the chart's NetworkPolicies do and drops the rest, and
has certificates. Then each connection is closed in turn. Needs root, `ip` and `nft` (Debian: iproute2, nftables).
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import click
import grpc
import httpx
from outrider.local import Speculator
from outrider.metadata.connection.embedded import find_server
from outrider.rpc.access.certificates import TlsFiles
from outrider.rpc.access.roles import Role
from outrider.rpc.channel import connect_to
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.certificates import Authority
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.output import columns, note
from outrider_controller.cli.up.process import ManagedProcess, ProcessSpec
from outrider_controller.cli.up.stack_options import run_async
from prometheus_client.parser import text_string_to_metric_families

from tests.connections import connections
from tests.soak.bridge import Bridge, run, why_not
from tests.unit.deploy.chart import rendered
from tests.unit.deploy.policies import Peer, Ports, between, pods

OUTSIDE, REDIS = "outside", "redis"
PROCESSES = tuple(role.value for role in Role if role is not Role.OPERATOR)
_PORTS = {"gateway": 8000, "router": 9100, "control": 9003, "target": 9001, "draft": 9001, REDIS: 6379}
_OPS = dict.fromkeys(PROCESSES, 9009) | {"router": 9200}
_NUM_TEXTS, _MAX_TOKENS, _IN_A_ROW = 20, 32, 2
_REQUEST_TIMEOUT_S, _CLOSED_TIMEOUT_S = 60.0, 6.0
_START_TIMEOUT_S, _EFFECT_TIMEOUT_S = 120.0, 60.0


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A way for TCP connections."""

    caller: str
    server: str
    port: int

    def __str__(self) -> str:
        return f"{self.caller} → {self.server}:{self.port}"


def _documented() -> frozenset[Edge]:
    """Those of docs/security.md. Outside are clients, operators and Prometheus."""
    names = {role: OUTSIDE if role is Role.OPERATOR else role.value for role in Role}
    between = {(names[caller], names[server]) for caller, server in connections()}
    between |= {(OUTSIDE, "gateway"), *((name, REDIS) for name in PROCESSES)}
    edges = {Edge(caller, server, _PORTS[server]) for caller, server in between}
    return frozenset(edges | {Edge(OUTSIDE, name, _OPS[name]) for name in PROCESSES})


EDGES = _documented()


@cache
def let_through() -> Mapping[tuple[str, str], Ports]:
    """By caller and server: the ports that the chart's policies open. Outside is a pod of the same namespace."""
    objects = rendered({"controller": {"mode": "plain"}})
    own = pods(objects)
    peers = {name: own.get(name, own["controller"]) for name in (*PROCESSES, REDIS)} | {OUTSIDE: Peer()}
    ends = [(caller, server) for caller in peers for server in peers if caller != server]
    return {(a, b): between(objects, peers[a], peers[b]) for a, b in ends}


# -- the network


@dataclass(slots=True)
class Network:
    """A namespace for each process and one for Redis, that lets through what the policies do and is not closed."""

    bridge: Bridge
    closed: set[Edge] = field(default_factory=set)

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[Network]:
        """Raises CalledProcessError."""
        with Bridge.made((REDIS, *PROCESSES)) as bridge:
            network = cls(bridge)
            network._filter()
            yield network

    def address(self, name: str) -> str:
        return self.bridge.outside if name == OUTSIDE else self.bridge.address(name)

    def close(self, edge: Edge) -> None:
        """Connections that stand, too."""
        self.closed = {edge}
        self._filter()

    def open_all(self) -> None:
        self.closed = set()
        self._filter()

    def dropped(self) -> dict[str, int]:
        """Packets by namespace, since a connection was last closed or opened."""
        listed = {name: run(*self._nft(name, "list", "table", "inet", "edges")) for name in PROCESSES}
        return {name: sum(_packets(line) for line in text.splitlines()) for name, text in listed.items()}

    def _nft(self, name: str, *command: str) -> tuple[str, ...]:
        return self.bridge.command(name, ("nft", *command))

    def _filter(self) -> None:
        for name in (*PROCESSES, REDIS):
            run(*self._nft(name, "-f", "-"), given=self._rules(name))

    def _rules(self, name: str) -> str:
        """Without connection tracking: a connection that is closed ends where it stands."""
        chains: dict[str, list[str]] = {"input": ['iif "lo" accept'], "output": ['oif "lo" accept']}
        reply = "tcp flags & (syn | ack) != syn accept"
        for ends, opened in let_through().items():
            for edge in self.closed:
                opened -= Ports.range("TCP", edge.port, edge.port) if (edge.caller, edge.server) == ends else Ports()
            ranges = [f"{first}-{last}" for protocol, first, last in opened.ranges() if protocol == "TCP"]
            if name not in ends or not ranges:
                continue
            caller, server = map(self.address, ends)
            ports = f"{{ {', '.join(ranges)} }}"
            if name == ends[1]:
                chains["input"].append(f"ip saddr {caller} tcp dport {ports} accept")
                chains["output"].append(f"ip daddr {caller} tcp sport {ports} {reply}")
            if name == ends[0]:
                chains["output"].append(f"ip daddr {server} tcp dport {ports} accept")
                chains["input"].append(f"ip saddr {server} tcp sport {ports} {reply}")
        text = "".join(
            f"chain {chain} {{ type filter hook {chain} priority 0; policy drop; {'; '.join(rules)};"
            # What IPv6 says of itself by itself is not counted.
            f" meta nfproto ipv6 drop; counter drop; }}\n"
            for chain, rules in chains.items()
        )
        return f"table inet edges {{}}\ndelete table inet edges\ntable inet edges {{\n{text}}}\n"


def _packets(rule: str) -> int:
    words = rule.split()
    return int(words[words.index("packets") + 1]) if "counter" in words else 0


# -- the cluster


@dataclass(slots=True)
class Cluster:
    """One process of each role, as others see it from outside."""

    network: Network
    directory: Path
    model: Path
    processes: dict[str, ManagedProcess] = field(default_factory=dict)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises ProcessFailed."""
        self._certificates()
        (self.directory / "salt").write_text("s" * 32)
        specs = [self._redis(), *(self._spec(name) for name in PROCESSES)]
        try:
            for spec in specs:
                process = ManagedProcess(spec, self.directory / f"{spec.name}.log")
                self.processes[spec.name] = process
                await process.start()
            await asyncio.gather(*(process.ready(_START_TIMEOUT_S) for process in self.processes.values()))
            yield
        finally:
            await asyncio.gather(*(process.stop(20) for process in self.processes.values()))

    def _certificates(self) -> None:
        authority, life = Authority.new(), timedelta(days=1)
        named = {role.value: [role.dns_name] for role in Role}
        named["public"] = [self.network.address("gateway")]
        for name, names in named.items():
            authority.issue(names, life).write(self.directory / name, authority.pem)

    def tls(self, name: str) -> TlsFiles:
        return TlsFiles(self.directory / name)

    def at(self, name: str, port: int | None = None) -> str:
        return f"{self.network.address(name)}:{port or _PORTS[name]}"

    def _redis(self) -> ProcessSpec:
        listens = ("--port", str(_PORTS[REDIS]), "--bind", self.network.address(REDIS), "--protected-mode", "no")
        argv = (find_server(), *listens, "--save", "", "--dir", str(self.directory))
        return ProcessSpec(REDIS, self.network.bridge.command(REDIS, argv), "")

    def _spec(self, name: str) -> ProcessSpec:
        listen = f"0.0.0.0:{_PORTS[name]}"
        worker = ("--model", str(self.model), "--dtype", "float32", "--threads", "1", "--listen", listen)
        own = {
            "target": ("outrider.target", *worker),
            "draft": ("outrider.draft", *worker),
            "router": (
                *("outrider_controller.router", "--listen", listen),
                *("--cache-salt-key-file", str(self.directory / "salt")),
            ),
            "control": ("outrider_controller.control", "--listen", listen),
            "gateway": (
                *("outrider.gateway", "--listen-http", listen, "--listen-grpc", f"{self.at('gateway', 8001)}"),
                *("--public-tls-dir", str(self.directory / "public")),
            ),
        }[name]
        shared = ("--metadata", f"redis://{self.at(REDIS)}", "--tls-dir", str(self.tls(name).directory))
        ends = ("--advertise", "auto", "--ops-listen", f"0.0.0.0:{_OPS[name]}")
        argv = self.network.bridge.command(name, (sys.executable, "-m", *own, *shared, *ends))
        return ProcessSpec(name, argv, "", answers=lambda: _ready(self.at(name, _OPS[name])))

    async def ask(self, token_ids: Sequence[int], timeout_s: float = _REQUEST_TIMEOUT_S) -> str | None:
        """A client's answer; None where there is none in that time."""
        asked = {"model": self.model.name, "prompt": list(token_ids), "max_tokens": _MAX_TOKENS, "temperature": 0}
        # Left to itself, the plan may find that it does not pay here.
        body = {**asked, "speculation": "on"}
        trusting = ssl.create_default_context(cafile=str(self.tls("public").authority))
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(verify=trusting, timeout=timeout_s) as http:
                answer = await http.post(f"https://{self.at('gateway')}/v1/completions", json=body)
                answer.raise_for_status()
                return str(answer.json()["choices"][0]["text"])
        return None

    async def metric(self, name: str, metric: str) -> float:
        """Its sum over all labels. Raises httpx.HTTPError."""
        async with httpx.AsyncClient(timeout=_CLOSED_TIMEOUT_S) as http:
            page = (await http.get(f"http://{self.at(name, _OPS[name])}/metrics")).text
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == metric)

    async def answers_operators(self, role: Role) -> bool:
        """Whether the router or the control plane does."""
        async with connect_to(role, self.tls("operator"))(self.at(role.value)) as channel:
            with suppress(grpc.RpcError):
                if role is Role.ROUTER:
                    router = router_pb2_grpc.RouterServiceStub(channel)
                    await router.ListModels(router_pb2.ListModelsRequest(), timeout=_CLOSED_TIMEOUT_S)
                else:
                    await self._control(channel).ListWorkers(
                        control_pb2.ListWorkersRequest(), timeout=_CLOSED_TIMEOUT_S
                    )
                return True
        return False

    async def routers_out_of_sight(self) -> bool:
        """Whether the control plane cannot ask the router."""
        async with connect_to(Role.CONTROL, self.tls("operator"))(self.at("control")) as channel:
            asked = control_pb2.ListActivitiesRequest()
            return bool((await self._control(channel).ListActivities(asked, timeout=30)).unreachable_routers)

    @staticmethod
    def _control(channel: grpc.aio.Channel) -> control_pb2_grpc.ControlServiceAsyncStub:
        return control_pb2_grpc.ControlServiceStub(channel)


def _ready(ops: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://{ops}/readyz", timeout=1.0).status_code == 200
    return False


# -- what a closed connection does

Sign = Callable[[Cluster], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Effect:
    """Of one connection that is closed: what is documented."""

    sign: Sign | None = None
    """What operators see."""
    answered: bool = True
    """New requests get their answers, with the same text."""
    drafted: bool = True
    """With speculation."""


def _away(name: str) -> Sign:
    async def sign(cluster: Cluster) -> bool:
        return await cluster.metric(name, "outrider_metadata_available") == 0

    return sign


def _silent(role: Role) -> Sign:
    async def sign(cluster: Cluster) -> bool:
        return not await cluster.answers_operators(role)

    return sign


def _not_ready(name: str) -> Sign:
    async def sign(cluster: Cluster) -> bool:
        return not await asyncio.to_thread(_ready, cluster.at(name, _OPS[name]))

    return sign


def _effects() -> Mapping[Edge, Effect]:
    found = {Edge(OUTSIDE, name, _OPS[name]): Effect(_not_ready(name)) for name in PROCESSES}
    for name in PROCESSES:
        found[Edge(name, REDIS, _PORTS[REDIS])] = Effect(_away(name), drafted=name != "draft")
    between = {
        (OUTSIDE, "gateway"): Effect(answered=False),
        (OUTSIDE, "router"): Effect(_silent(Role.ROUTER)),
        (OUTSIDE, "control"): Effect(_silent(Role.CONTROL)),
        ("gateway", "router"): Effect(answered=False),
        ("router", "target"): Effect(_not_ready("router"), answered=False),
        ("target", "draft"): Effect(drafted=False),
        ("router", "control"): Effect(),
        ("control", "router"): Effect(Cluster.routers_out_of_sight),
    }
    return {**found, **{Edge(*ends, _PORTS[ends[1]]): effect for ends, effect in between.items()}}


EFFECTS = _effects()


@dataclass(frozen=True, slots=True)
class Outcome:
    edge: Edge
    problem: str
    """Empty: just what is documented."""
    seconds: float
    healed_s: float


@dataclass(slots=True)
class Prover:
    """Asks, and knows what has to come."""

    cluster: Cluster
    expected: Mapping[tuple[int, ...], str]
    """By prompt."""

    async def equal(self) -> int:
        """Texts that are the expected ones."""
        given = await asyncio.gather(*(self.cluster.ask(prompt) for prompt in self.expected))
        return sum(text == expected for text, expected in zip(given, self.expected.values(), strict=True))

    async def closed(self, edge: Edge) -> Outcome:
        begun_s = time.monotonic()
        self.cluster.network.close(edge)
        problem = await self._problem(EFFECTS[edge])
        seconds, opened_s = time.monotonic() - begun_s, time.monotonic()
        self.cluster.network.open_all()
        healed = await _within(lambda: self._as(Effect()))
        for name in PROCESSES:
            healed = await _within(partial(asyncio.to_thread, _ready, self.cluster.at(name, _OPS[name]))) and healed
        problem = problem or ("" if healed else "it does not heal")
        return Outcome(edge, problem, seconds, time.monotonic() - opened_s)

    async def _problem(self, effect: Effect) -> str:
        # A request gives those who sent nothing a reason to look.
        await self._as(effect)
        if effect.sign is not None and not await _within(lambda: _seen(effect, self.cluster)):
            return "operators do not see it"
        return "" if await _within(lambda: self._stays(effect)) else "answers are not as documented"

    async def _stays(self, effect: Effect) -> bool:
        """Where a draft came late, once is chance."""
        return all([await self._as(effect) for _ in range(_IN_A_ROW)])

    async def _as(self, effect: Effect) -> bool:
        """Whether the next answer is like that. What tells of drafts may itself be out of reach."""
        prompt, expected = next(iter(self.expected.items()))
        if not effect.answered:
            return await self.cluster.ask(prompt, _CLOSED_TIMEOUT_S) is None
        before = await self._num_drafted()
        if await self.cluster.ask(prompt) != expected:
            return False
        after = await self._num_drafted()
        return before is None or after is None or (after > before) == effect.drafted

    async def _num_drafted(self) -> float | None:
        with suppress(httpx.HTTPError):
            return await self.cluster.metric("target", "outrider_spec_decode_num_draft_tokens_total")
        return None


async def _seen(effect: Effect, cluster: Cluster) -> bool:
    assert effect.sign is not None
    return await effect.sign(cluster)


async def _within(holds: Callable[[], Awaitable[bool]]) -> bool:
    end_s = time.monotonic() + _EFFECT_TIMEOUT_S
    while not await holds():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.3)
    return True


def expected_texts(model: Path, count: int) -> dict[tuple[int, ...], str]:
    """What the model says by itself, in this process: no network, no draft."""
    prompts = [tuple(b"Tell me a story about number %d." % number) for number in range(count)]
    alone = Speculator(str(model), dtype="float32").generate(prompts, max_new_tokens=_MAX_TOKENS, speculate=False)
    return {prompt: completion.text for prompt, completion in zip(prompts, alone, strict=True)}


@asynccontextmanager
async def proving(num_texts: int) -> AsyncIterator[Prover]:
    """A cluster in namespaces, all connections open. Raises ProcessFailed, CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="outrider-edges-") as scratch, Network.made() as network:
        cluster = Cluster(network, Path(scratch), tiny_checkpoint(Path(scratch) / "tiny"))
        expected = expected_texts(cluster.model, num_texts)
        async with cluster.running():
            yield Prover(cluster, expected)


@click.command("namespaces")
@click.option("--edge", "chosen", multiple=True, metavar="CALLER-SERVER", help="Only these; may be given again.")
def namespaces(chosen: Sequence[str]) -> int:
    """Each role in a network namespace of its own, with certificates: are the documented connections all that it needs?

    Asks for 20 texts, and compares them to what the model says by itself; then closes each connection in turn.
    """
    if reason := why_not("nft"):
        note(f"skipped: {reason}")
        return ExitCode.OK
    edges = [edge for edge in sorted(EDGES) if not chosen or f"{edge.caller}-{edge.server}" in chosen]
    return run_async(_namespaces(edges))


async def _namespaces(edges: Iterable[Edge]) -> int:
    async with proving(_NUM_TEXTS) as prover:
        equal = await prover.equal()
        drafted = await prover.cluster.metric("target", "outrider_spec_decode_num_accepted_tokens_total")
        dropped = prover.cluster.network.dropped()
        click.echo(f"{equal} of {_NUM_TEXTS} texts equal, {drafted:.0f} drafted tokens accepted; dropped: {dropped}")
        outcomes = []
        for edge in edges:
            outcomes.append(await prover.closed(edge))
            note(f"{edge}: {outcomes[-1].problem or 'as documented'}")
    rows = [[str(o.edge), o.problem or "as documented", f"{o.seconds:.1f}", f"{o.healed_s:.1f}"] for o in outcomes]
    click.echo(columns(["CLOSED", "EFFECT", "AFTER S", "HEALED AFTER S"], rows))
    holds = equal == _NUM_TEXTS and drafted > 0 and not any(dropped.values()) and not any(o.problem for o in outcomes)
    return ExitCode.OK if holds else ExitCode.ERROR
