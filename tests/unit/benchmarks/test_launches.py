"""What is counted as a launch, and as a copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytestmark = pytest.mark.usefixtures("interpreted")


def test_views_are_no_launches_and_copies_are_counted_by_direction() -> None:
    from benchmarks.support.launches import counted

    x = torch.ones(4, 6)
    with counted() as counts:
        y = (x.view(6, 4)[2:].t() @ x).relu()
        torch.tensor([1, 2], device="cpu")
        y.to("cpu", non_blocking=True)
        y.cpu().tolist()
    assert (counts.products, counts.others, counts.copies) == (1, 1, (2, 1))


@pytest.fixture
def dirty() -> Iterator[None]:
    """Memory that nothing wrote is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.usefixtures("dirty")
def test_a_step_is_counted_layer_by_layer() -> None:
    from benchmarks.support.launches import SHAPES, counts_of

    counts = counts_of("smollm2")
    layers = SHAPES["smollm2"][0]
    assert {(found.products, found.attention) for name, found in counts.items() if "head" not in name} == {
        (4 * layers + 1, 2 * layers)
    }
    assert all(found.copies[1] == 1 for name, found in counts.items() if "head" not in name)
    # The logits are written where they are read.
    assert counts["decode"]["copy_"] == 0
    # One tells its steps where they write, one comes before them: where the texts are read.
    assert counts["head, 4 tokens"].copies == (2, 1)
    assert counts["5, sampled, penalties"] == counts["5, sampled"]
    assert counts["decode, fp8"] == counts["decode"]
