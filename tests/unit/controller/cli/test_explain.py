"""outrider explain: each mode and reason in words, with what would change it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from outrider.rpc.v1 import control_pb2, worker_pb2
from outrider_controller.autoscaler.estimator import STATE
from outrider_controller.autoscaler.evidence import Cell, EvidenceKey, own_drafts_of
from outrider_controller.autoscaler.plan import Decision, Mode, Reason
from outrider_controller.cli.change.speculation import explained
from outrider_controller.control.api.decisions import because, decision_row, server_caps, under_servers, would_change
from outrider_controller.plan_messages import decision_to_proto

CELL = Cell("acme", "m")
VALUES = dict(zip(STATE, (100.0, 250.0, 40.0, 90.0, 5.0, 300.0, 150.0, 4000.0), strict=True))
KNOWN = (EvidenceKey("acme", "m", "d@1"), list(VALUES.values()))


def message(decision: Decision) -> Any:
    return decision_to_proto(CELL, replace(decision, draft="d@1"), [KNOWN])


def test_a_tenant_that_is_on_reads_why_and_how_far_it_is_from_another_mode() -> None:
    decision = Decision(
        Mode.ON, Reason.SAVES, (("d@1", 1.0),), saving=0.4, lower=0.3, upper=0.5, rounds=4000, price=0.2
    )
    lines = "\n".join(explained("acme", message(decision)))
    for part in (
        "acme at m, draft workers: on",
        "source  d@1: 1.19 × plain, 50% accepted, 4,000 rounds",
        "save time",
        "below 1.02 × plain: now 1.25",
        "speed   1.19 × plain (1.14 to 1.25, 80 %)",
        "4,000 rounds",
        "50% accepted",
        "d@1",
        "price   0.2:",
    ):
        assert part in lines


def test_the_sources_in_the_target_are_told_apart_each_with_what_it_saves() -> None:
    cell = Cell("acme", own_drafts_of("m"))
    sums = [
        (EvidenceKey(*cell, "ngram"), [100.0, 250.0, 90.0, 90.0, 0.0, 300.0, 150.0, 4000.0]),
        (EvidenceKey(*cell, "suffix"), [10.0, 12.0, -2.0, 9.0, 0.0, 40.0, 4.0, 10.0]),
    ]
    decision = Decision(Mode.ON, Reason.SAVES, (("ngram", 1.0),), saving=0.9, rounds=4000, draft="ngram")
    said = decision_to_proto(cell, decision, sums)
    lines = "\n".join(explained("acme", said))
    for part in (
        "acme at m, drafts that the target makes itself: on",
        "source  ngram: 1.56 × plain, 50% accepted, 4,000 rounds",
        "source  suffix: speed not measured yet, 10% accepted, 10 rounds",
    ):
        assert part in lines
    assert [(one["source"], one["saving"]) for one in decision_row(said)["sources"]] == [
        ("ngram", 0.9),
        ("suffix", -0.2),
    ]
    unseen = decision_to_proto(cell, Decision(Mode.OFF, Reason.NO_DRAFT), [])
    assert "allowed" in because(unseen) and "lookup" in would_change(unseen)


def test_no_speed_is_said_from_a_handful_of_rounds() -> None:
    few = [EvidenceKey("acme", "m", "d@1"), [1.0, 20.0, 19.0, 20.0, 0.0, 20.0, 20.0, 1.0]]
    decision = Decision(Mode.ON, Reason.UNKNOWN, (("d@1", 1.0),), saving=19.0, rounds=1, draft="d@1")
    said = decision_to_proto(CELL, decision, [few])
    row, lines = decision_row(said), "\n".join(explained("acme", said))
    assert row["times_plain"] is row["times_plain_interval"] is row["price"] is row["sources"][0]["times_plain"] is None
    assert "not measured yet: 1 of 50 rounds" in lines and "×" not in lines and "50 rounds of its own" in lines


def test_an_interval_on_one_side_is_not_called_unclear() -> None:
    decision = Decision(Mode.ON, Reason.BETWEEN, saving=-0.2, lower=-0.3, upper=-0.1, rounds=400)
    assert "hardly any time, but" in because(message(decision))
    assert "not clear" in because(message(replace(decision, upper=0.1)))


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    for mode in Mode:
        one = message(Decision(mode, reason))
        assert because(one) != reason
        assert would_change(one)


def server(name: str, caps: dict[str, int], model: str = "m") -> control_pb2.WorkerStatus:
    info = worker_pb2.WorkerInfo(role=worker_pb2.WORKER_ROLE_TARGET, worker_id=name, model=model)
    info.tenant_draft_tokens.update(caps)
    return control_pb2.WorkerStatus(info=info)


@pytest.mark.parametrize(
    ("servers", "mode"),
    [
        ([server("a", {"": 4, "acme": 0})], "off"),
        ([server("a", {"": 0})], "off"),
        ([server("a", {"": 0, "acme": 2})], "on"),
        ([server("a", {"": 0}), server("b", {"": 4})], "on"),
        ([server("a", {"": 0}), server("b", {})], "on"),
        ([server("a", {"": 0}), server("b", {}, "other")], "off"),
        ([server("a", {"": 0}, "other")], "on"),
        ([], "on"),
    ],
)
def test_a_tenant_that_its_servers_allow_no_drafts_is_off_whatever_the_plan_says(
    servers: list[control_pb2.WorkerStatus], mode: str
) -> None:
    caps = server_caps(servers, "acme")
    for cell in (CELL, Cell("acme", own_drafts_of("m"))):
        said = decision_to_proto(cell, Decision(Mode.ON, Reason.SAVES, (("d@1", 1.0),), rounds=400), [])
        row, lines = under_servers(decision_row(said), caps), list(explained("acme", said, caps))
        assert row["mode"] == mode and lines[0].endswith(f": {mode}")
        assert ("max_draft_tokens is 0" in row["why"]) == ("max_draft_tokens is 0" in lines[1]) == (mode == "off")
