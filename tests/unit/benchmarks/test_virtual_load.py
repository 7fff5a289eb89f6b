"""With a price per row, speculation is as fast as the better of always and never, and faster where streams differ."""

from __future__ import annotations

import pytest

from benchmarks.support.virtual_load import ARMS, StepLine, run

# Of the benchmark's own machine: what the product chooses is tested with the product.
pytestmark = pytest.mark.slow

TILES, VECTORS, GPU = StepLine(0.012, 0.0006), StepLine(0.010, 0.0035), StepLine(0.020, 0.00005)


def of_best(line: StepLine, streams: int) -> float:
    rates = {arm: run(line, streams, arm, steps=600).tokens_per_s for arm in ARMS}
    return rates["auto"] / max(rates["on"], rates["off"])


@pytest.mark.parametrize("streams", [1, 4, 8])
@pytest.mark.parametrize("line", [TILES, VECTORS, GPU], ids=["tiles", "vectors", "gpu"])
def test_auto_is_never_worse_than_the_better_of_always_and_never(line: StepLine, streams: int) -> None:
    assert of_best(line, streams) >= 0.99


@pytest.mark.parametrize(("line", "streams"), [(TILES, 8), (VECTORS, 2)])
def test_where_texts_differ_it_is_better_than_both(line: StepLine, streams: int) -> None:
    assert of_best(line, streams) >= 1.05
