"""What every process says of itself is said in one way, and which releases work together."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from outrider.protocol.identity import SPOKEN, ProtocolRange, new_worker_id, own_info, package_version, protocol_problem
from outrider.rpc.v1 import worker_pb2


def test_a_worker_id_names_the_role_and_is_another_at_every_start() -> None:
    assert re.fullmatch(r"draft-[0-9a-f]{12}", new_worker_id("draft"))
    assert new_worker_id("draft") != new_worker_id("draft")
    assert own_info(worker_pb2.WORKER_ROLE_TARGET).worker_id.startswith("target-")


def test_the_release_is_that_of_the_installed_distribution() -> None:
    assert package_version() == version("outrider")


def test_a_process_says_which_versions_it_speaks() -> None:
    info = own_info(worker_pb2.WORKER_ROLE_ROUTER, max_sequences=7)
    assert ProtocolRange.of(info) == SPOKEN and info.max_sequences == 7
    assert protocol_problem(info) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "spoken"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (1, 1), 1),
        ((1, 1), (1, 2), 1),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 2), 2),
        ((1, 1), (2, 3), None),
        ((3, 4), (1, 2), None),
        ((1, 1), (0, 0), None),
        ((1, 2), (3, 1), None),
    ],
)
def test_a_release_works_with_the_one_before_and_the_one_after(
    ours: tuple[int, int], theirs: tuple[int, int], spoken: int | None
) -> None:
    assert ProtocolRange(*ours).common(ProtocolRange(*theirs)) == spoken


def test_a_process_from_before_ranges_speaks_its_one_version() -> None:
    assert ProtocolRange.of(worker_pb2.WorkerInfo(protocol_version=3)) == ProtocolRange(3, 3)


def test_a_peer_of_another_age_is_told_both_ranges() -> None:
    info = worker_pb2.WorkerInfo(worker_id="target-1", protocol_version=4, min_protocol_version=3)
    assert protocol_problem(info, ProtocolRange(1, 2)) == (
        "protocol_version: 1 to 2 is spoken here, 3 to 4 by target-1"
    )
