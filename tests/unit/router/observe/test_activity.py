"""Sums by tenant and by worker, of what has ended and of what runs."""

from __future__ import annotations

from outrider.protocol.rounds import RequestStats
from outrider.rpc.v1 import trace_pb2 as trace
from outrider_controller.router.observe.activity import _MAX_NAMES, Activity, Work


def work(tenant: str, *workers: str, tokens: int, verified: int = 0, accepted: int = 0) -> Work:
    stats = RequestStats(num_verified_tokens=verified, num_accepted_draft_tokens=accepted)
    return Work(tenant, workers, tokens, stats)


def named(sums: list[trace.Activity]) -> dict[str, tuple[int, int, int, int, int]]:
    return {
        s.tenant or s.worker_id: (
            s.num_running,
            s.num_ended,
            s.output_tokens,
            s.num_verified_tokens,
            s.num_accepted_draft_tokens,
        )
        for s in sums
    }


def test_a_request_counts_for_its_tenant_and_for_the_workers_that_it_is_on() -> None:
    activity = Activity()
    activity.ended(work("a", "t1", "d1", tokens=10, verified=8, accepted=4))
    activity.ended(work("b", "t1", tokens=3))
    running = [work("a", "t2", "d1", tokens=5, verified=2, accepted=1)]
    assert named(activity.sums(running)) == {
        "a": (1, 1, 15, 10, 5),
        "b": (0, 1, 3, 0, 0),
        "t1": (0, 2, 13, 8, 4),
        "t2": (1, 0, 5, 2, 1),
        "d1": (1, 1, 15, 10, 5),
    }
    # What runs is not added to what has ended.
    assert named(activity.sums([]))["a"] == (0, 1, 10, 8, 4)


def test_names_are_bounded() -> None:
    activity = Activity()
    for number in range(2 * _MAX_NAMES):
        activity.ended(work("a", f"t{number}", tokens=1))
    assert len(activity.sums([])) == _MAX_NAMES
    # Whoever still asks keeps the sums.
    assert named(activity.sums([]))["a"][:2] == (0, 2 * _MAX_NAMES)
