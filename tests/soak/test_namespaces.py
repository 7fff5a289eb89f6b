"""Every role alone in a network namespace, with certificates: the documented connections are all that it needs."""

from __future__ import annotations

import pytest

from tests.soak.bridge import why_not
from tests.soak.namespaces import EDGES, EFFECTS, Edge, let_through, proving
from tests.unit.deploy.policies import Ports

pytestmark = pytest.mark.timeout(600)


def test_it_is_said_what_each_connection_does_when_it_is_closed() -> None:
    assert set(EFFECTS) == EDGES


def test_the_charts_policies_open_what_is_documented_and_no_other_port_that_a_process_listens_on() -> None:
    listening = {(edge.server, edge.port) for edge in EDGES}
    opened = {
        Edge(caller, server, port)
        for (caller, server), ports in let_through().items()
        for of, port in listening
        if of == server and (ports & Ports.range("TCP", port, port)).ranges()
    }
    # A pod has routers and a control plane, and the first call targets.
    assert opened == EDGES | {Edge("control", "target", 9001)}


@pytest.mark.skipif(bool(why_not("nft")), reason=why_not("nft"))
async def test_what_is_not_documented_is_not_needed() -> None:
    """`python -m tests.soak namespaces` closes each connection in turn."""
    async with proving(6) as prover:
        assert await prover.equal() == 6
        assert not any(prover.cluster.network.dropped().values())
        outcome = await prover.closed(Edge("target", "draft", 9001))
        assert outcome.problem == ""
