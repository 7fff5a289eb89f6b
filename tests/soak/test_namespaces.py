"""Every role alone in a network namespace, with certificates: the documented connections are all that it needs."""

from __future__ import annotations

import pytest

from tests.soak.bridge import why_not
from tests.soak.namespaces import EDGES, EFFECTS, Edge, proving

pytestmark = pytest.mark.timeout(600)


def test_it_is_said_what_each_connection_does_when_it_is_closed() -> None:
    assert set(EFFECTS) == EDGES


@pytest.mark.skipif(bool(why_not("nft")), reason=why_not("nft"))
async def test_what_is_not_documented_is_not_needed() -> None:
    """`python -m tests.soak namespaces` closes each connection in turn."""
    async with proving(6) as prover:
        assert await prover.equal() == 6
        assert not any(prover.cluster.network.dropped().values())
        outcome = await prover.closed(Edge("target", "draft", 9001))
        assert outcome.problem == ""
