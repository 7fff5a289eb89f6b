"""Alerts go up and come down once each, at the bounds that they are documented with."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.control.alerts.active import Alert, AlertKind, Alerts, Change

CELL = Cell("acme", "m")
KEY = EvidenceKey("acme", "m", "d@1")


def told(changes: Sequence[Change]) -> list[str]:
    return [f"{'+' if change.raised else '-'}{change.alert.kind}" for change in changes]


class Cluster:
    """Of one tenant, second by second."""

    def __init__(self) -> None:
        self.alerts = Alerts()
        self.now_s = 1000.0

    def seconds(
        self,
        count: int,
        *,
        verified: int = 0,
        acceptance: float = 0.0,
        late: int = 0,
        missed: int = 0,
        price: float = 0.0,
    ) -> list[str]:
        """So many seconds of 20 rounds each, less those that missed their draft; what was told in them."""
        found: list[str] = []
        for _ in range(count):
            self.now_s += 1
            if verified or missed:
                accepted = verified * acceptance
                seen = Evidence(rounds=20 - missed, late=late, verified=verified, accepted=accepted, missed=missed)
                self.alerts.learn({KEY: seen})
            found += told(self.alerts.step({"m": price}, self.now_s))
        return found


def test_acceptance_that_falls_by_a_tenth_is_told_once_and_again_when_it_is_back() -> None:
    cluster = Cluster()
    assert cluster.seconds(600, verified=60, acceptance=0.8) == []
    assert cluster.seconds(60, verified=60, acceptance=0.76) == []
    assert cluster.seconds(300, verified=60, acceptance=0.3) == ["+acceptance_fell"]
    alert = Alert(AlertKind.ACCEPTANCE_FELL, "m", "acme")
    assert "over the last hour" in cluster.alerts.active[alert]
    assert cluster.seconds(300, verified=60, acceptance=0.8) == ["-acceptance_fell"]
    assert cluster.alerts.active == {}


def test_a_tenant_that_has_just_come_and_one_that_hardly_drafts_raise_nothing() -> None:
    assert Cluster().seconds(60, verified=20, acceptance=0.1) == []
    cluster = Cluster()
    cluster.seconds(600, verified=60, acceptance=0.9)
    cluster.seconds(600)
    assert cluster.seconds(30, verified=2, acceptance=0.0) == []


def test_a_thousand_tokens_that_are_all_guessed_are_a_text_that_repeats_itself() -> None:
    cluster = Cluster()
    assert cluster.seconds(9, verified=100, acceptance=1.0) == []
    assert cluster.seconds(1, verified=100, acceptance=1.0) == ["+output_loops"]
    assert cluster.seconds(10, verified=100, acceptance=0.9) == ["-output_loops"]
    assert cluster.seconds(20, verified=100, acceptance=0.97) == []


def test_drafts_that_come_late_for_most_rounds_are_told_between_two_bounds() -> None:
    cluster = Cluster()
    assert "+drafts_starved" in cluster.seconds(120, verified=20, acceptance=0.5, late=15)
    assert cluster.seconds(120, verified=20, acceptance=0.5, late=8) == []
    assert cluster.seconds(120, verified=20, acceptance=0.5, late=1) == ["-drafts_starved"]


def test_rounds_for_which_no_draft_was_found_at_all_are_starved_too() -> None:
    cluster = Cluster()
    assert cluster.seconds(120, missed=20) == ["+drafts_starved"]
    assert "none at all for 100%" in cluster.alerts.active[Alert(AlertKind.DRAFTS_STARVED, "m", "acme")]
    assert cluster.seconds(180, verified=20, acceptance=0.5) == ["-drafts_starved"]


def test_an_alert_of_whom_nothing_is_heard_comes_down_and_its_tenant_is_forgotten() -> None:
    cluster = Cluster()
    cluster.seconds(10, verified=100, acceptance=1.0)
    assert cluster.seconds(400) == ["-output_loops"]
    assert len(cluster.alerts._watched) == 1
    cluster.seconds(3700)
    assert len(cluster.alerts._watched) == 0


def test_a_mode_that_changes_a_third_time_within_ten_minutes_flaps() -> None:
    cluster = Cluster()
    for expected in ([], [], ["+mode_flaps"]):
        cluster.alerts.mode_changed(CELL)
        assert cluster.seconds(60) == expected
    assert cluster.seconds(600) == ["-mode_flaps"]


def test_a_price_is_high_once_it_was_so_for_a_minute_and_low_below_another_bound() -> None:
    cluster = Cluster()
    assert cluster.seconds(50, price=0.6) == []
    assert cluster.seconds(5, price=0.3) == []
    assert cluster.seconds(60, price=0.6) == []
    assert cluster.seconds(10, price=0.6) == ["+price_high"]
    assert cluster.seconds(10, price=0.45) == []
    assert cluster.seconds(10, price=0.3) == ["-price_high"]
    assert Alert(AlertKind.PRICE_HIGH, "m") not in cluster.alerts.active
