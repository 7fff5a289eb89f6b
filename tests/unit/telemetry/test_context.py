"""Trace context passes on what is well-formed, and counts everything else as absent."""

from __future__ import annotations

import pytest
from outrider.telemetry.context import NO_CONTEXT, TraceContext

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_what_is_well_formed_is_passed_on_as_it_came() -> None:
    pairs = [("accept", "x"), ("traceparent", PARENT), ("tracestate", "a=1,b=2")]
    context = TraceContext.of(pairs)
    assert context.headers == {"traceparent": PARENT, "tracestate": "a=1,b=2"}
    assert context.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_later_version_may_say_more() -> None:
    assert TraceContext.of([("traceparent", "01" + PARENT[2:] + "-more")]).trace_id


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        PARENT.upper(),
        PARENT + "-more",
        "ff" + PARENT[2:],
        PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        PARENT.replace("00f067aa0ba902b7", "0" * 16),
        PARENT + "\n",
        PARENT.encode() + b"\xff",
    ],
)
def test_what_is_malformed_counts_as_absent(parent: str | bytes) -> None:
    assert TraceContext.of([("traceparent", parent), ("tracestate", "a=1")]) == NO_CONTEXT


@pytest.mark.parametrize("state", ["x" * 513, "é", "a\r\nb"])
def test_a_state_that_cannot_be_sent_on_is_left_out(state: str) -> None:
    assert TraceContext.of([("traceparent", PARENT), ("tracestate", state)]).headers == {"traceparent": PARENT}


def test_without_headers_there_is_no_context() -> None:
    assert TraceContext.of(None) == TraceContext.of([]) == NO_CONTEXT
    assert NO_CONTEXT.headers == {}
