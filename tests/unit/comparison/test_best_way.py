"""Which drafts that ship are fastest for their target."""

from __future__ import annotations

import pytest
from outrider.comparison.best_way import best_way, chosen
from outrider.engine import EngineConfig, resolve
from outrider.ways import SHIPPED, Measured


@pytest.mark.parametrize(
    ("lookups", "head", "draft", "way"),
    [
        (1.1, 1.69, 1.37, ("head", "")),
        (1.1, 1.43, 1.50, ("head", "")),
        (1.1, 1.43, 1.70, ("", "draft")),
        (0.98, 0.7, 0.9, ("", "")),
    ],
)
def test_the_fastest_is_chosen_and_a_draft_worker_has_to_bring_clearly_more(
    lookups: float, head: float, draft: float, way: tuple[str, str]
) -> None:
    found = chosen((Measured("", "", lookups), Measured("head", "", head), Measured("", "draft", draft)))
    assert (found.head, found.draft) == way
    assert ("has to bring" in found.line) == (draft > head > 1 and not found.draft)


@pytest.mark.slow
def test_each_way_of_a_target_is_measured_and_one_of_them_is_faster_than_plain_decoding() -> None:
    name, shipped = "smollm2-135m-instruct", SHIPPED["smollm2-135m-instruct"]
    found = best_way(resolve(name), shipped, EngineConfig())
    times = {(one.head, one.draft): one.times_plain for one in found.measured}
    assert set(times) == {("", ""), (shipped.head, ""), ("", shipped.draft)}
    assert times[found.head, found.draft] > 1.0
    assert found.line.startswith("drafts: ") and "\n" not in found.line
