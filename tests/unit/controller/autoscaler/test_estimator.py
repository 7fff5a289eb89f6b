"""What is estimated of a tenant's draft: its own evidence, as far as there is any."""

from __future__ import annotations

import pytest
from outrider_controller.autoscaler.estimator import SavingEstimator
from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.tuning import HALF_LIFE_ROUNDS

ACME = EvidenceKey("acme", "target", "draft@1")


def evidence(rounds: float, saving: float) -> Evidence:
    return Evidence(rounds, 2 * rounds, saving * rounds, (saving**2 + 1) * rounds)


def estimated(estimator: SavingEstimator, key: EvidenceKey) -> tuple[float, float]:
    estimate, row = estimator.estimate(), estimator.keys.index(key)
    return float(estimate.saving[row]), float(estimate.error[row])


def test_much_evidence_counts_and_little_is_drawn_towards_what_is_usual_at_the_target() -> None:
    estimator = SavingEstimator()
    estimator.learn({ACME: evidence(1000, -0.5), EvidenceKey("new", "target", "draft@1"): evidence(5, 0.5)})
    saving, error = estimated(estimator, ACME)
    assert saving == pytest.approx(-0.5, abs=0.05)
    assert error < 0.1
    new, uncertain = estimated(estimator, EvidenceKey("new", "target", "draft@1"))
    assert -0.5 < new < 0
    assert uncertain > 2 * error


def test_evidence_fades_with_rounds_and_not_with_time() -> None:
    estimator = SavingEstimator()
    estimator.learn({ACME: evidence(5000, 1.0)})
    # Others work meanwhile, for however long.
    for _ in range(100):
        estimator.learn({EvidenceKey("busy", "target", "draft@1"): evidence(1000, -1.0)})
    assert estimated(estimator, ACME)[0] > 0.8
    estimator.learn({ACME: evidence(HALF_LIFE_ROUNDS, -1.0)})
    # Half of what was known of it and, summed up at once, a half-life of what is new.
    assert estimated(estimator, ACME)[0] < 0.9


def test_what_one_process_knows_another_can_take_over() -> None:
    estimator, other = SavingEstimator(), SavingEstimator()
    estimator.learn({ACME: evidence(200, -0.2), EvidenceKey("b", "other", "draft@1"): evidence(50, 0.4)})
    other.restore([(key, estimator.of(key)) for key in estimator.keys])
    assert other.keys == estimator.keys
    assert other.estimate().saving.tolist() == estimator.estimate().saving.tolist()


def test_more_keys_than_there_was_room_for() -> None:
    estimator = SavingEstimator()
    estimator.expect(EvidenceKey(f"tenant {n}", "target", "draft@1") for n in range(1000))
    estimator.learn({EvidenceKey("tenant 900", "target", "draft@1"): evidence(300, 1.0)})
    assert estimator.column("seen")[900] == 300
    assert estimator.keys[900].tenant == "tenant 900"
    assert estimator.cells[estimator.cell_of[900]] == Cell("tenant 900", "target")


def test_evidence_adds_up() -> None:
    one, both = Evidence(), Evidence()
    one.add_rounds(rounds=4, tokens=8, saved=2.0, late=1, verified=3, accepted=2)
    both.merge(one)
    both.merge(one)
    assert both == Evidence(rounds=8, tokens=16, saved=4.0, saved_squared=2.0, late=2, verified=6, accepted=4)


def test_what_is_known_of_others_stays_where_a_tenant_is_forgotten() -> None:
    estimator, other = SavingEstimator(), EvidenceKey("other", "target", "draft@1")
    estimator.learn({ACME: evidence(200, -0.2), other: evidence(50, 0.4)})
    left = estimator.without({"acme"})
    assert left.keys == [other]
    assert left.of(other) == estimator.of(other)
