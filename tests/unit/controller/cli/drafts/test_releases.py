"""What `outrider autopilot` does next: decided by a script in the place of the cluster and of the machine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from outrider.rpc.v1 import drafts_pb2 as drafts
from outrider_controller.cli.drafts.releases import (
    MIN_SAMPLES,
    REST_S,
    Autopilot,
    Fallen,
    Release,
    ReleaseStep,
    StepFailed,
)
from outrider_controller.cli.exits import CommandError

ACME = Fallen("acme", "0.40 over the last minute, 0.60 over the last hour", consents=True, num_samples=200)


@dataclass
class ScriptedWorld:
    alerts: list[Fallen] = field(default_factory=lambda: [ACME])
    tokens_per_round: tuple[float, float] = (1.9, 1.7)
    fails: str = ""
    consenting: bool = True
    state: drafts.RolloutState.ValueType | None = None
    """None: no worker is seen."""
    now_s: float = 1e9
    running: set[str] = field(default_factory=set)
    noted: list[ReleaseStep] = field(default_factory=list)
    distilled: list[tuple[Release, float]] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    undone: set[str] = field(default_factory=set)

    def fallen(self) -> list[Fallen]:
        return self.alerts

    def consents(self, tenant: str) -> bool:
        return self.consenting

    def distil(self, release: Release, within_s: float, meanwhile: Callable[[], None]) -> None:
        meanwhile()
        if self.fails:
            raise StepFailed(self.fails)
        self.distilled.append((release, within_s))

    def compare(self, release: Release, meanwhile: Callable[[], None]) -> tuple[float, float]:
        meanwhile()
        return self.tokens_per_round

    def keep_workers(self, drafts: Collection[str]) -> None:
        self.running = set(drafts)

    def rollout(self, release: Release) -> drafts.Rollout | None:
        return None if self.state is None else drafts.Rollout(state=self.state, reason="the evidence")

    def withdrawn(self) -> set[str]:
        return self.undone

    def note(self, release: Release) -> None:
        self.noted.append(release.step)

    def clear(self, release: Release) -> None:
        self.cleared.append(release.name)


def pilot_of(world: ScriptedWorld, directory: Path) -> Autopilot:
    return Autopilot(world, directory, "shipped", budget_s=600.0, clock=lambda: world.now_s)


def turns(pilot: Autopilot, count: int) -> None:
    for _ in range(count):
        pilot.turn()


def test_a_release_goes_from_the_fall_to_its_promotion_and_its_draft_is_in_use_then(tmp_path: Path) -> None:
    world = ScriptedWorld()
    pilot = pilot_of(world, tmp_path)
    turns(pilot, 3)
    (distilled,) = world.distilled
    assert distilled[0].in_use == "shipped" and distilled[0].name == "acme-1" and distilled[1] == 600.0
    assert world.noted == [ReleaseStep.DISTIL, ReleaseStep.COMPARE, ReleaseStep.ROLLOUT]
    turns(pilot, 1)
    assert world.running == {str(tmp_path / "acme-1")}, "no worker before it is better"
    world.state = drafts.ROLLOUT_STATE_RUNNING
    turns(pilot, 3)
    assert world.noted[-1] is ReleaseStep.ROLLOUT and not world.cleared
    world.state = drafts.ROLLOUT_STATE_PROMOTED
    turns(pilot, 2)
    assert world.noted[-1] is ReleaseStep.PROMOTED and world.cleared == ["acme-1"]
    assert world.running == {str(tmp_path / "acme-1")}, "it goes on drafting"

    world.now_s += REST_S
    world.state = None
    turns(pilot, 2)
    assert world.distilled[-1][0].in_use == str(tmp_path / "acme-1") and world.distilled[-1][0].name == "acme-2"


def test_a_restarted_autopilot_goes_on_where_it_was_and_only_with_what_is_left_of_its_time(tmp_path: Path) -> None:
    world = ScriptedWorld()
    turns(pilot_of(world, tmp_path), 1)
    world.now_s += 100.0
    turns(pilot_of(world, tmp_path), 1)
    assert world.distilled[0][1] == 500.0 and world.noted == [ReleaseStep.DISTIL, ReleaseStep.COMPARE]
    turns(pilot_of(world, tmp_path), 1)
    again = pilot_of(world, tmp_path)
    turns(again, 1)
    assert world.running == {str(tmp_path / "acme-1")} and again.book.release is not None
    world.state = drafts.ROLLOUT_STATE_UNDONE
    turns(pilot_of(world, tmp_path), 1)
    last = pilot_of(world, tmp_path)
    assert world.noted[-1] is ReleaseStep.ENDED and last.book.release is None and not last.book.promoted
    turns(last, 1)
    assert world.running == set(), "the worker of a draft that was undone stops"


@pytest.mark.parametrize(
    ("world", "noted", "why"),
    [
        (
            ScriptedWorld(fails="outrider distill ended with exit code 1"),
            [ReleaseStep.DISTIL, ReleaseStep.ENDED],
            "exit code 1",
        ),
        (
            ScriptedWorld(tokens_per_round=(1.72, 1.70)),
            [ReleaseStep.DISTIL, ReleaseStep.COMPARE, ReleaseStep.ENDED],
            "+0.007 rounds a token",
        ),
    ],
)
def test_a_step_that_fails_and_a_draft_that_is_no_better_end_it(
    tmp_path: Path, world: ScriptedWorld, noted: list[ReleaseStep], why: str
) -> None:
    reasons: list[str] = []
    note = world.note

    def noting(release: Release) -> None:
        note(release)
        reasons.append(release.reason)

    world.note = noting  # type: ignore[method-assign]
    turns(pilot_of(world, tmp_path), 8)
    assert world.noted == noted and why in reasons[-1] and not world.running
    assert world.cleared == ["acme-1"]


def test_a_release_ends_when_its_time_is_over_and_when_no_worker_comes_up(tmp_path: Path) -> None:
    world = ScriptedWorld()
    pilot = pilot_of(world, tmp_path)
    turns(pilot, 1)
    world.now_s += 601.0
    turns(pilot, 1)
    assert world.noted == [ReleaseStep.DISTIL, ReleaseStep.ENDED] and not world.distilled
    world.now_s += REST_S
    turns(pilot, 4)
    assert world.noted[-1] is ReleaseStep.ROLLOUT
    world.now_s += 601.0
    turns(pilot, 1)
    assert world.noted[-1] is ReleaseStep.ENDED


def test_a_release_needs_consent_enough_samples_and_a_day_since_the_last_one(tmp_path: Path) -> None:
    silent = Fallen("silent", "", consents=False, num_samples=500)
    new = Fallen("new", "", consents=True, num_samples=MIN_SAMPLES - 1)
    world = ScriptedWorld(alerts=[silent, new])
    pilot = pilot_of(world, tmp_path)
    turns(pilot, 3)
    assert not world.noted
    assert "samples: text" in pilot.held_back(silent) and "at least 32" in pilot.held_back(new)
    world.alerts, world.tokens_per_round = [silent, ACME], (1.1, 1.5)
    turns(pilot, 4)
    assert world.noted == [ReleaseStep.DISTIL, ReleaseStep.COMPARE, ReleaseStep.ENDED] and "24.0 h" in pilot.held_back(
        ACME
    )
    world.alerts = [ACME, Fallen("other", "", consents=True, num_samples=100)]
    turns(pilot, 1)
    assert pilot.book.release is not None and pilot.book.release.name == "other-2"
    assert "other-2 is under way" in pilot.held_back(ACME)


@pytest.mark.parametrize("done", [1, 2])
def test_a_release_ends_when_its_tenant_withdraws_its_consent_while_samples_are_read(tmp_path: Path, done: int) -> None:
    world = ScriptedWorld()
    pilot = pilot_of(world, tmp_path)
    turns(pilot, done)
    world.consenting = False
    turns(pilot, 1)
    assert world.noted[-1] is ReleaseStep.ENDED and len(world.noted) == done + 1
    assert world.cleared == ["acme-1"] and pilot.book.release is None


def test_while_the_control_plane_is_away_a_distillation_goes_on(tmp_path: Path) -> None:
    world = ScriptedWorld()

    def away(tenant: str) -> bool:
        raise CommandError("away")

    world.consents = away  # type: ignore[method-assign]
    turns(pilot_of(world, tmp_path), 2)
    assert world.noted == [ReleaseStep.DISTIL, ReleaseStep.COMPARE]


def test_the_worker_of_a_promoted_draft_is_looked_after_during_a_distillation_and_runs_again_after_a_restart(
    tmp_path: Path,
) -> None:
    world = ScriptedWorld(state=drafts.ROLLOUT_STATE_PROMOTED)
    turns(pilot_of(world, tmp_path), 4)
    acme = {str(tmp_path / "acme-1")}
    world.running, world.alerts = set(), [Fallen("other", "", consents=True, num_samples=100)]
    pilot = pilot_of(world, tmp_path)
    turns(pilot, 1)
    assert world.running == acme and world.noted[-1] is ReleaseStep.DISTIL
    seen: list[set[str]] = []

    def distil(release: Release, within_s: float, meanwhile: Callable[[], None]) -> None:
        world.running = set()
        meanwhile()
        seen.append(world.running)

    world.distil = distil  # type: ignore[method-assign]
    turns(pilot, 1)
    assert seen == [acme]


def test_where_the_cluster_does_not_answer_nothing_is_lost(tmp_path: Path) -> None:
    world = ScriptedWorld()
    pilot = pilot_of(world, tmp_path)
    turns(pilot, 1)

    def away(release: Release) -> None:
        raise CommandError("away")

    note, world.note = world.note, away  # type: ignore[method-assign]
    with pytest.raises(CommandError):
        pilot.turn()
    assert pilot.book.release is not None and pilot.book.release.step is ReleaseStep.DISTIL
    world.note = note  # type: ignore[method-assign]
    turns(pilot, 1)
    assert world.noted == [ReleaseStep.DISTIL, ReleaseStep.COMPARE]


def test_a_promoted_draft_that_is_undone_loses_its_worker_and_the_next_one_begins_without_it(tmp_path: Path) -> None:
    world = ScriptedWorld(state=drafts.ROLLOUT_STATE_PROMOTED)
    turns(pilot_of(world, tmp_path), 4)
    pilot = pilot_of(world, tmp_path)
    world.alerts = []
    turns(pilot, 1)
    assert world.running == {str(tmp_path / "acme-1")}
    world.undone = {"acme-1", "another"}
    turns(pilot, 1)
    assert world.running == set() and not pilot_of(world, tmp_path).book.promoted
    assert pilot_of(world, tmp_path).next_release(ACME).in_use == "shipped"
