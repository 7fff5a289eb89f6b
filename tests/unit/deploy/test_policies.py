"""Who may call whom: the rendered NetworkPolicies, the table of RPCs in the code, and the table in docs/deploy.md."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import pytest
from outrider.rpc.access.roles import Role

from tests.connections import connections
from tests.unit.deploy.chart import RAY_MODES, Object, of_kind, profile, rendered
from tests.unit.deploy.policies import EVERY, ROLE, Peer, Ports, let_in, let_out, pods, port_range, ranges

PAGE = Path(__file__).parents[3] / "docs/deploy.md"
PROCESSES = ("gateway", "controller", "target", "draft")
CASES = ("default", "plain", *RAY_MODES, "ha", "h100-tp8", "everything", "everything-kuberay")
Edges = dict[tuple[str, str], Ports]
"""By caller and called: roles, and as callers also clients, operators and Prometheus."""


def by_the_code(mode: str, routers: int) -> Edges:
    """The connections between roles, and those that are no RPCs: of clients, to Redis, to ops ports."""
    ray = mode in RAY_MODES
    router = port_range("TCP", 32768, 60999) if ray else port_range("TCP", 9100, 9099 + routers)
    ports = {Role.ROUTER: router, Role.TARGET: _tcp(9001), Role.DRAFT: _tcp(9001), Role.CONTROL: _tcp(9003)}
    pod = {Role.ROUTER: "controller", Role.CONTROL: "controller", Role.OPERATOR: "operators"}
    edges: Edges = defaultdict(int)
    for caller, called in connections():
        edges[pod.get(caller, caller.value), pod.get(called, called.value)] |= ports[called]
    edges["clients", "gateway"] |= _tcp(8000, 8001)
    for role in PROCESSES:
        edges[role, "redis"] |= _tcp(6379)
        ops = _tcp(9009)
        if role == "controller" and not ray:
            ops |= port_range("TCP", 9200, 9199 + routers)
        for caller in ("operators", "prometheus"):
            edges[caller, role] |= ops
    if ray:
        edges["controller", "controller"] = EVERY
    return edges


def by_the_page(mode: str, routers: int) -> Edges:
    """The table of docs/deploy.md. Where several are called, the ports of each stand between semicolons."""
    callers = {
        "anybody, or `networkPolicy.clients`": ["clients"],
        "gateway": ["gateway"],
        "routers, control planes": ["controller"],
        "targets": ["target"],
        "gateway, controller, targets, drafts": list(PROCESSES),
        "`networkPolicy.prometheus`": ["prometheus"],
        "the namespace, or `networkPolicy.operators`": ["operators"],
    }
    called = {
        "gateway": ["gateway"],
        "routers, in the controller's pods": ["controller"],
        "routers and control planes of other pods": ["controller"],
        "routers": ["controller"],
        "the control API": ["controller"],
        "targets": ["target"],
        "drafts": ["draft"],
        "Redis": ["redis"],
        "ops ports": list(PROCESSES),
    }
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", PAGE.read_text().partition("but these calls:")[2], re.MULTILINE)[
        :8
    ]
    assert rows[0] == ("from", "to", "port")
    edges: Edges = defaultdict(int)
    of_routers = ""
    for one, many, cell in rows[1:]:
        clauses: list[str] = []
        for clause in cell.split("; "):
            if clause.startswith("on a Ray cluster "):
                if mode in RAY_MODES:
                    clauses[-1] = clause.removeprefix("on a Ray cluster ")
            elif not clause.startswith("of a Redis elsewhere "):
                clauses.append(of_routers if clause == "as for gateways" else clause)
        of_routers = clauses[0] if one == "gateway" else of_routers
        for names, clause in zip(many.split("; "), clauses, strict=True):
            for caller in callers[one]:
                for role in called[names]:
                    edges[caller, role] |= _written(clause, role, routers)
    return edges


def _written(clause: str, role: str, routers: int) -> Ports:
    ports = 0
    for word in clause.split(", "):
        if found := re.fullmatch(r"(\d+)( \(\w+\))?", word):
            ports |= _tcp(int(found[1]))
        elif found := re.fullmatch(r"(\d+) to (\d+)", word):
            ports |= port_range("TCP", int(found[1]), int(found[2]))
        elif found := re.fullmatch(r"(\d+) and up", word):
            # Of routers, one each.
            first = int(found[1])
            ports |= port_range("TCP", first, first + routers - 1) if role == "controller" else 0
        elif word == "all ports of its pods":
            ports |= EVERY
        else:
            assert word == "one a router", word
    return ports


def _tcp(*numbers: int) -> Ports:
    return sum(port_range("TCP", number, number) for number in numbers)


@pytest.mark.parametrize("routers", [1, 4])
@pytest.mark.parametrize("mode", ["ray", "plain", *RAY_MODES])
def test_the_page_says_what_the_code_asks_for(mode: str, routers: int) -> None:
    code, page = by_the_code(mode, routers), by_the_page(mode, routers)
    assert {ends: ranges(ports) for ends, ports in page.items()} == {
        ends: ranges(ports) for ends, ports in code.items()
    }


def differences(objects: list[Object], values: dict[str, Any]) -> list[str]:
    """Between what the policies let through, at both ends, and what the code asks for."""
    own = pods(objects)
    mode, routers = values.get("controller", {}).get("mode", "ray"), values.get("controller", {}).get("routers", 1)
    edges, settings = by_the_code(mode, routers), values.get("networkPolicy", {})
    for number in (8000, 9009):
        edges["test", "gateway"] |= _tcp(number)
    peers = {**own, **_strangers(own)}
    found = []
    for role, pod in own.items():
        for name, peer in peers.items():
            callers = {name} & own.keys() | _parts(name, peer, settings)
            asked = ranges(reduce(or_, (edges[caller, role] for caller in callers), 0))
            if (allowed := let_in(objects, peer, pod)) != asked:
                found.append(f"in: {name} → {role}: {allowed}, not {asked}")
            asked = ranges(edges[role, name] | _outward(role, peer, values))
            if (allowed := let_out(objects, pod, peer)) != asked:
                found.append(f"out: {role} → {name}: {allowed}, not {asked}")
    return found


def _strangers(own: dict[str, Peer]) -> dict[str, Peer]:
    """Such as have to stay out: they look like ours but for one thing."""
    found = {}
    for role, pod in own.items():
        found[f"{role} of another release"] = Peer({**pod.labels, "app.kubernetes.io/instance": "other"})
        found[f"{role} of another chart"] = Peer({**pod.labels, "app.kubernetes.io/name": "other"})
        found[f"{role} elsewhere"] = Peer(pod.labels, "elsewhere")
    found |= {name: Peer({}, name) for name in ("llm", "monitoring", "operators", "tracing", "kube-system")}
    addresses = {"client": "10.20.1.1", "excepted client": "10.20.9.1", "internet": "203.0.113.7"}
    return found | {name: Peer({}, "", address) for name, address in addresses.items()}


def _parts(name: str, peer: Peer, settings: dict[str, Any]) -> set[str]:
    """That a peer plays, of clients, operators and Prometheus: by the values that name them, or by default."""
    here = peer.namespace == "llm" and not peer.address
    plays = {
        "clients": name == "client" if settings.get("clients") else True,
        "operators": name == "operators" if settings.get("operators") else here,
        "prometheus": name == "monitoring" and bool(settings.get("prometheus")),
    }
    return {part for part, played in plays.items() if played}


def _outward(role: str, peer: Peer, values: dict[str, Any]) -> Ports:
    """What a pod may call wherever it is: DNS, models, a Redis elsewhere, collectors."""
    if role == "redis":
        return 0
    found = port_range("UDP", 53, 53) | _tcp(53) | port_range("UDP", 5353, 5353) | _tcp(5353)
    if role == "test":
        return found
    settings = values.get("networkPolicy", {})
    if role in ("target", "draft") and settings.get("allowDownload", True):
        found |= _tcp(443)
    if not values.get("redis", {}).get("enabled", True):
        found |= _tcp(6379, 26379)
    if settings.get("egress") and peer.namespace == "tracing":
        found |= _tcp(4317)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_policies_let_through_exactly_what_the_code_asks_for(name: str) -> None:
    values = profile(name)
    assert differences(rendered(values), values) == []


def _policy(objects: list[Object], role: str) -> Object:
    (found,) = [one for one in of_kind(objects, "NetworkPolicy") if one["metadata"]["labels"][ROLE] == role]
    spec: Object = found["spec"]
    return spec


def _widen_range(objects: list[Object]) -> None:
    (port,) = [port for rule in _policy(objects, "controller")["ingress"][:1] for port in rule["ports"]]
    port["endPort"] = 65535


def _any_release(objects: list[Object]) -> None:
    del _policy(objects, "draft")["ingress"][0]["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"]


def _any_release_outward(objects: list[Object]) -> None:
    del _policy(objects, "target")["egress"][0]["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"]


def _other_pods(objects: list[Object]) -> None:
    _policy(objects, "draft")["podSelector"]["matchLabels"][ROLE] = "drafts"


def _no_types(objects: list[Object]) -> None:
    _policy(objects, "redis")["policyTypes"] = []


def _no_egress(objects: list[Object]) -> None:
    _policy(objects, "gateway")["policyTypes"] = ["Ingress"]


def _protocol(objects: list[Object]) -> None:
    _policy(objects, "target")["ingress"][0]["ports"][0]["protocol"] = "UDP"


def _all_ports(objects: list[Object]) -> None:
    del _policy(objects, "redis")["ingress"][0]["ports"]


def _everybody(objects: list[Object]) -> None:
    _policy(objects, "redis")["ingress"][0]["from"] = []


def _every_namespace(objects: list[Object]) -> None:
    _policy(objects, "target")["ingress"][0]["from"][0]["namespaceSelector"] = {}


def _none_for_drafts(objects: list[Object]) -> None:
    objects[:] = [
        one for one in objects if one["kind"] != "NetworkPolicy" or one["metadata"]["labels"][ROLE] != "draft"
    ]


@pytest.mark.parametrize(
    "widen",
    [
        _widen_range,
        _any_release,
        _any_release_outward,
        _other_pods,
        _no_types,
        _no_egress,
        _protocol,
        _all_ports,
        _everybody,
        _every_namespace,
        _none_for_drafts,
    ],
)
def test_a_policy_that_lets_more_through_is_found(widen: Callable[[list[Object]], None]) -> None:
    objects = copy.deepcopy(rendered({}))
    widen(objects)
    assert differences(objects, {})
