"""Each answer is counted once, whatever comes after its end."""

from __future__ import annotations

import pytest
from outrider.errors import Unavailable
from outrider.gateway.generation.metrics import GatewayMetrics
from outrider.gateway.generation.observer import observed
from outrider.gateway.generation.requests import Generation, TextPrompt
from outrider.gateway.generation.stats import AnswerFinish, RunningStats, Usage
from outrider.telemetry.context import NO_CONTEXT
from prometheus_client import CollectorRegistry


@pytest.mark.parametrize("error", [Unavailable("none", reason="ROUTERS_FAILED"), ValueError()])
def test_an_answer_that_has_ended_does_not_fail_with_another_one(error: Exception) -> None:
    metrics, asked = GatewayMetrics(CollectorRegistry()), Generation("m", TextPrompt("x"))
    with (
        pytest.raises(type(error)),
        observed(metrics, None, asked, NO_CONTEXT, 0.0) as first,
        observed(metrics, None, asked, NO_CONTEXT, 0.0) as second,
    ):
        for one in (first, second):
            one.prepared("id", "m", 1)
        stats = RunningStats(0.0)
        stats.add_tokens(3, 1.0)
        first.chunk(3, AnswerFinish("stop", Usage(1, 3, 0), stats.summary(1.0)), 1.0)
        raise error
    counted = {
        family.name: sum(one.value for one in family.samples if one.name.endswith("_total"))
        for metric in (metrics.succeeded, metrics.failed)
        for family in metric.collect()
    }
    assert list(counted.values()) == [1, 1], counted
