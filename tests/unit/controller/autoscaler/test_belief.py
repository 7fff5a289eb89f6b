"""What is believed of a pairing: its own evidence, as far as there is any."""

from __future__ import annotations

import pytest
from outrider_controller.autoscaler.belief import HALF_LIFE_ROUNDS, Beliefs
from outrider_controller.autoscaler.evidence import Cell, Evidence, Pairing

ACME = Pairing("acme", "target", "draft@1")


def evidence(rounds: float, saving: float) -> Evidence:
    return Evidence(rounds, 2 * rounds, saving * rounds, (saving**2 + 1) * rounds)


def believed(beliefs: Beliefs, pairing: Pairing) -> tuple[float, float]:
    estimate, row = beliefs.estimate(), beliefs.pairings.index(pairing)
    return float(estimate.saving[row]), float(estimate.error[row])


def test_much_evidence_is_believed_and_little_is_drawn_towards_what_is_usual_at_the_target() -> None:
    beliefs = Beliefs()
    beliefs.learn({ACME: evidence(1000, -0.5), Pairing("new", "target", "draft@1"): evidence(5, 0.5)})
    saving, error = believed(beliefs, ACME)
    assert saving == pytest.approx(-0.5, abs=0.05)
    assert error < 0.1
    new, uncertain = believed(beliefs, Pairing("new", "target", "draft@1"))
    assert -0.5 < new < 0
    assert uncertain > 2 * error


def test_evidence_fades_with_rounds_and_not_with_time() -> None:
    beliefs = Beliefs()
    beliefs.learn({ACME: evidence(5000, 1.0)})
    # Others work meanwhile, for however long.
    for _ in range(100):
        beliefs.learn({Pairing("busy", "target", "draft@1"): evidence(1000, -1.0)})
    assert believed(beliefs, ACME)[0] > 0.8
    beliefs.learn({ACME: evidence(HALF_LIFE_ROUNDS, -1.0)})
    # Half of what was known of it and, summed up at once, a half-life of what is new.
    assert believed(beliefs, ACME)[0] < 0.9


def test_what_one_process_knows_another_can_take_over() -> None:
    beliefs, other = Beliefs(), Beliefs()
    beliefs.learn({ACME: evidence(200, -0.2), Pairing("b", "other", "draft@1"): evidence(50, 0.4)})
    other.restore([(pairing, beliefs.of(pairing)) for pairing in beliefs.pairings])
    assert other.pairings == beliefs.pairings
    assert other.estimate().saving.tolist() == beliefs.estimate().saving.tolist()


def test_more_pairings_than_there_was_room_for() -> None:
    beliefs = Beliefs()
    beliefs.expect(Pairing(f"tenant {n}", "target", "draft@1") for n in range(1000))
    beliefs.learn({Pairing("tenant 900", "target", "draft@1"): evidence(300, 1.0)})
    assert beliefs.column("seen")[900] == 300
    assert beliefs.pairings[900].tenant == "tenant 900"
    assert beliefs.cells[beliefs.cell_of[900]] == Cell("tenant 900", "target")


def test_evidence_adds_up() -> None:
    one, both = Evidence(), Evidence()
    one.add_rounds(rounds=4, tokens=8, saved=2.0, late=1, verified=3, accepted=2)
    both.merge(one)
    both.merge(one)
    assert both == Evidence(rounds=8, tokens=16, saved=4.0, saved_squared=2.0, late=2, verified=6, accepted=4)


def test_what_is_known_of_others_stays_where_a_tenant_is_forgotten() -> None:
    beliefs, other = Beliefs(), Pairing("other", "target", "draft@1")
    beliefs.learn({ACME: evidence(200, -0.2), other: evidence(50, 0.4)})
    left = beliefs.without({"acme"})
    assert left.pairings == [other]
    assert left.of(other) == beliefs.of(other)
