"""What NetworkPolicies let through, decided as Kubernetes decides it: by labels, ranges, protocols, and both ends."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tests.unit.deploy.chart import Object, of_kind, pod_specs

ROLE = "app.kubernetes.io/component"
NAMESPACE = "kubernetes.io/metadata.name"
PROTOCOLS = ("TCP", "UDP", "SCTP")
Ports = int
"""A set of them: a bit each, those of UDP and SCTP above those of TCP."""
EVERY: Ports = sum((1 << 65536) - 2 << 65536 * number for number in range(len(PROTOCOLS)))

Range = tuple[str, int, int]


@dataclass(frozen=True)
class Peer:
    """A pod, or with an address whoever is outside of the cluster."""

    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "llm"
    address: str = ""


def port_range(protocol: str, first: int, last: int) -> Ports:
    return (1 << last - first + 1) - 1 << first + 65536 * PROTOCOLS.index(protocol)


def ranges(ports: Ports) -> list[Range]:
    parts = ((name, ports >> 65536 * number & (1 << 65536) - 1) for number, name in enumerate(PROTOCOLS))
    return [(name, *ends) for name, bits in parts for ends in _runs(bits)]


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    at = 0
    while bits:
        skipped = (bits & -bits).bit_length() - 1
        bits >>= skipped
        length = (~bits & (bits + 1)).bit_length() - 1
        bits >>= length
        yield at + skipped, at + skipped + length - 1
        at += skipped + length


def pods(objects: list[Object]) -> dict[str, Peer]:
    """Of a release, one for each role; those of a role differ in nothing that a policy here asks for."""
    return {labels[ROLE]: Peer(labels) for labels, _ in pod_specs(objects)}


def let_in(objects: list[Object], caller: Peer, called: Peer) -> list[Range]:
    return ranges(_allowed(objects, called, caller, "Ingress", "from"))


def let_out(objects: list[Object], caller: Peer, called: Peer) -> list[Range]:
    return ranges(_allowed(objects, caller, called, "Egress", "to"))


def _allowed(objects: list[Object], own: Peer, other: Peer, direction: str, peers: str) -> Ports:
    """Of the policies that choose a pod, whether they say so together; without any, everything."""
    policies = [one for one in of_kind(objects, "NetworkPolicy") if _governs(one, own, direction)]
    if not policies:
        return EVERY
    allowed = 0
    for policy in policies:
        for rule in policy["spec"].get(direction.lower()) or []:
            # No peers, or an empty list of them: everybody.
            if not rule.get(peers) or any(_is(peer, other) for peer in rule[peers]):
                allowed |= _ports(rule.get("ports"))
    return allowed


def _governs(policy: Object, pod: Peer, direction: str) -> bool:
    spec = policy["spec"]
    # As the API defaults it, also for an empty list.
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return (
        direction in types and pod.namespace == "llm" and not pod.address and _selects(spec["podSelector"], pod.labels)
    )


def _is(peer: Object, other: Peer) -> bool:
    if "ipBlock" in peer:
        inside: Callable[[str], bool] = lambda cidr: ipaddress.ip_address(other.address) in ipaddress.ip_network(cidr)  # noqa: E731
        block = peer["ipBlock"]
        return bool(other.address) and inside(block["cidr"]) and not any(map(inside, block.get("except", ())))
    if other.address:
        return False
    named = {NAMESPACE: other.namespace}
    there = _selects(peer["namespaceSelector"], named) if "namespaceSelector" in peer else other.namespace == "llm"
    return there and _selects(peer.get("podSelector", {}), other.labels)


def _selects(selector: Object, labels: Mapping[str, str]) -> bool:
    if unknown := selector.keys() - {"matchLabels"}:
        raise NotImplementedError(f"selector: {unknown}")
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _ports(ports: list[Object] | None) -> Ports:
    """Without a list, or with an empty one: all."""
    if not ports:
        return EVERY
    found = 0
    for port in ports:
        protocol = port.get("protocol", "TCP")
        first = port.get("port")
        found |= port_range(protocol, first or 1, port.get("endPort", first or 65535))
    return found
