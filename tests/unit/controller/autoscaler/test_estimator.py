"""What is estimated of a pairing: its own evidence, as far as there is any."""

from __future__ import annotations

import pytest
from outrider_controller.autoscaler.estimator import HALF_LIFE_ROUNDS, SavingEstimator
from outrider_controller.autoscaler.evidence import Cell, Evidence, Pairing

ACME = Pairing("acme", "target", "draft@1")


def evidence(rounds: float, saving: float) -> Evidence:
    return Evidence(rounds, 2 * rounds, saving * rounds, (saving**2 + 1) * rounds)


def estimated(estimator: SavingEstimator, pairing: Pairing) -> tuple[float, float]:
    estimate, row = estimator.estimate(), estimator.pairings.index(pairing)
    return float(estimate.saving[row]), float(estimate.error[row])


def test_much_evidence_counts_and_little_is_drawn_towards_what_is_usual_at_the_target() -> None:
    estimator = SavingEstimator()
    estimator.learn({ACME: evidence(1000, -0.5), Pairing("new", "target", "draft@1"): evidence(5, 0.5)})
    saving, error = estimated(estimator, ACME)
    assert saving == pytest.approx(-0.5, abs=0.05)
    assert error < 0.1
    new, uncertain = estimated(estimator, Pairing("new", "target", "draft@1"))
    assert -0.5 < new < 0
    assert uncertain > 2 * error


def test_evidence_fades_with_rounds_and_not_with_time() -> None:
    estimator = SavingEstimator()
    estimator.learn({ACME: evidence(5000, 1.0)})
    # Others work meanwhile, for however long.
    for _ in range(100):
        estimator.learn({Pairing("busy", "target", "draft@1"): evidence(1000, -1.0)})
    assert estimated(estimator, ACME)[0] > 0.8
    estimator.learn({ACME: evidence(HALF_LIFE_ROUNDS, -1.0)})
    # Half of what was known of it and, summed up at once, a half-life of what is new.
    assert estimated(estimator, ACME)[0] < 0.9


def test_what_one_process_knows_another_can_take_over() -> None:
    estimator, other = SavingEstimator(), SavingEstimator()
    estimator.learn({ACME: evidence(200, -0.2), Pairing("b", "other", "draft@1"): evidence(50, 0.4)})
    other.restore([(pairing, estimator.of(pairing)) for pairing in estimator.pairings])
    assert other.pairings == estimator.pairings
    assert other.estimate().saving.tolist() == estimator.estimate().saving.tolist()


def test_more_pairings_than_there_was_room_for() -> None:
    estimator = SavingEstimator()
    estimator.expect(Pairing(f"tenant {n}", "target", "draft@1") for n in range(1000))
    estimator.learn({Pairing("tenant 900", "target", "draft@1"): evidence(300, 1.0)})
    assert estimator.column("seen")[900] == 300
    assert estimator.pairings[900].tenant == "tenant 900"
    assert estimator.cells[estimator.cell_of[900]] == Cell("tenant 900", "target")


def test_evidence_adds_up() -> None:
    one, both = Evidence(), Evidence()
    one.add_rounds(rounds=4, tokens=8, saved=2.0, late=1, verified=3, accepted=2)
    both.merge(one)
    both.merge(one)
    assert both == Evidence(rounds=8, tokens=16, saved=4.0, saved_squared=2.0, late=2, verified=6, accepted=4)


def test_what_is_known_of_others_stays_where_a_tenant_is_forgotten() -> None:
    estimator, other = SavingEstimator(), Pairing("other", "target", "draft@1")
    estimator.learn({ACME: evidence(200, -0.2), other: evidence(50, 0.4)})
    left = estimator.without({"acme"})
    assert left.pairings == [other]
    assert left.of(other) == estimator.of(other)
