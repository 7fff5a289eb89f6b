"""The native kernels, variant by variant."""

from __future__ import annotations

import pytest
from outrider.engine.backends.cpu import KernelsMissing, load_kernels

from tests.unit.engine.variants import slow_but_the_best


@pytest.fixture(scope="module", params=slow_but_the_best())
def variant(request: pytest.FixtureRequest) -> str:
    """Each that this CPU can run."""
    name: str = request.param
    try:
        load_kernels(name)
    except KernelsMissing as error:
        pytest.skip(str(error))
    return name
