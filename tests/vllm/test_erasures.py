"""What was ordered to be erased is, also where a target on vLLM wrote it: one that is up when the order comes, and one
that was down. The other target is one of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.target import test_erasures as ours
from tests.integration.target.test_erasures import (
    cluster,
    test_a_deleted_tenant_leaves_nothing_and_the_next_one_of_its_name_is_another,
    test_a_request_that_began_with_the_consent_of_before_is_not_recorded_later,
    test_a_target_that_was_down_erases_before_it_serves_and_the_order_is_pending_until_then,
    test_an_order_holds_after_the_metadata_store_was_restarted_and_after_it_lost_its_data,
)
from tests.vllm.served import Loaded, loaded, running

__all__ = [
    "cluster",
    "test_a_deleted_tenant_leaves_nothing_and_the_next_one_of_its_name_is_another",
    "test_a_request_that_began_with_the_consent_of_before_is_not_recorded_later",
    "test_a_target_that_was_down_erases_before_it_serves_and_the_order_is_pending_until_then",
    "test_an_order_holds_after_the_metadata_store_was_restarted_and_after_it_lost_its_data",
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def engine(tiny_vllm: Path) -> Iterator[Loaded]:
    with loaded(tiny_vllm, lookups="ngram") as made:
        yield made


@pytest.fixture(autouse=True, params=["one", "two"])
def on_vllm(engine: Loaded, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The target with the volume of this name."""
    target = ours.Cluster.target

    def either(self: ours.Cluster, name: str, **options: Any) -> Any:
        if name != request.param:
            return target(self, name, **options)
        return running(engine, metadata_url=self.url, samples=str(self.directory / name), **options)

    monkeypatch.setattr(ours.Cluster, "target", either)
