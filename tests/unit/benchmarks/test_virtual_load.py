"""With a price per row, speculation is as fast as the better of always and never, and faster where streams differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.support.virtual_load import ARMS, FAR, NEAR, RunResult, StepLine, run

# Of the benchmark's own machine: what the product chooses is tested with the product.
pytestmark = pytest.mark.slow

TILES, VECTORS, GPU = StepLine(0.012, 0.0006), StepLine(0.010, 0.0035), StepLine(0.020, 0.00005)


def ran(line: StepLine, streams: int, steps: int = 1000) -> dict[str, RunResult]:
    """Half of the streams are near to what the draft knows."""
    texts = [NEAR if number % 2 == 0 else FAR for number in range(streams)]
    return {arm: run(line, texts, arm, seconds=steps * line.seconds(streams)) for arm in ARMS}


def of_best(arms: dict[str, RunResult]) -> float:
    return arms["auto"].goodput / max(arms["on"].goodput, arms["off"].goodput)


@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize("line", [TILES, VECTORS, GPU], ids=["tiles", "vectors", "gpu"])
def test_auto_is_never_worse_than_the_better_of_always_and_never(line: StepLine, streams: int) -> None:
    assert of_best(ran(line, streams)) >= 0.99


@pytest.mark.parametrize(("line", "streams"), [(TILES, 4), (TILES, 8), (VECTORS, 2)])
def test_where_texts_differ_it_is_better_than_both(line: StepLine, streams: int) -> None:
    assert of_best(ran(line, streams)) >= 1.05


def test_rows_go_to_the_streams_whose_drafts_are_right() -> None:
    auto = ran(VECTORS, 8)["auto"]
    assert auto.drafted[FAR] <= 0.15 * auto.drafted[NEAR]


def test_a_tenant_outside_the_drafts_domain_costs_the_other_one_little() -> None:
    inside, outside = replace(NEAR, tenant="inside"), replace(FAR, tenant="outside")
    texts = [inside, outside] * 8
    both = run(TILES, texts, "auto", seconds=30)
    forced = run(TILES, texts, "auto", seconds=30, plain=(outside,))
    assert both.tokens[inside] / both.seconds >= 0.97 * forced.tokens[inside] / forced.seconds
    assert both.drafted[outside] <= 0.1 * both.drafted[inside]
