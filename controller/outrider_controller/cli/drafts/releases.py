"""What `outrider autopilot` does next: one release of a draft at a time, from the fall of a tenant's acceptance to the
verdict on a draft that has learnt from its samples. Knows no network and no processes; the clock is an argument.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from outrider.rpc.v1 import drafts_pb2 as drafts
from outrider.user_cache import write_whole

from outrider_controller.cli.exits import CommandError

MIN_SAMPLES = 32
REST_S = 86_400.0
"""After a release of a tenant, before its next one."""
MIN_GAIN = 0.01
"""Rounds for each committed token, that the new draft has to save more than the draft in use on held-out samples. A
rollout judges them too; a share of the verified tokens is higher for a draft that proposes less."""
_STARTING_S = 600.0


class StepFailed(Exception):
    """The release ends, and the message says why."""


class ReleaseStep(enum.StrEnum):
    DISTIL = "distil"
    COMPARE = "compare"
    ROLLOUT = "rollout"
    PROMOTED = "promoted"
    ENDED = "ended"
    """Without a new draft."""


_LAST = (ReleaseStep.PROMOTED, ReleaseStep.ENDED)


@dataclass(frozen=True, slots=True)
class Fallen:
    """A tenant whose acceptance has fallen, as the alert says."""

    tenant: str
    reason: str
    consents: bool
    """To samples with text."""
    num_samples: int


@dataclass(frozen=True, slots=True)
class Release:
    """One new draft for one tenant."""

    tenant: str
    number: int
    in_use: str
    """The draft that it begins as and is compared with: a name or a directory."""
    out: str
    """Its directory."""
    step: ReleaseStep
    reason: str
    """Why it is at this step."""
    since_s: float
    """Unix time at which the step began."""

    @property
    def name(self) -> str:
        return Path(self.out).name


@dataclass(slots=True)
class Book:
    """What a restarted autopilot goes on from."""

    release: Release | None = None
    number: int = 0
    """Of the last release."""
    promoted: dict[str, str] = field(default_factory=dict)
    """By tenant: the directory of its draft."""
    ended_s: dict[str, float] = field(default_factory=dict)
    """By tenant: Unix time at which its last release ended."""

    @classmethod
    def read(cls, file: Path) -> Book:
        if not file.exists():
            return cls()
        kept = json.loads(file.read_text())
        if (release := kept["release"]) is not None:
            kept["release"] = Release(**{**release, "step": ReleaseStep(release["step"])})
        return cls(**kept)

    def write(self, file: Path) -> None:
        write_whole(file, json.dumps(asdict(self), indent=2))


class World(Protocol):
    """What a release asks of a cluster and of this machine. All may raise CommandError: a later turn asks again."""

    def fallen(self) -> list[Fallen]: ...

    def consents(self, tenant: str) -> bool:
        """To samples with text, now."""
        ...

    def distil(self, release: Release, within_s: float, meanwhile: Callable[[], None]) -> None:
        """Calls `meanwhile` at once and every few seconds, as `compare` does; what that raises ends it. Raises
        StepFailed."""
        ...

    def compare(self, release: Release, meanwhile: Callable[[], None]) -> tuple[float, float]:
        """Committed tokens a round in held-out samples: with the new draft, and with that in use. Raises StepFailed."""
        ...

    def keep_workers(self, drafts: Collection[str]) -> None:
        """Starts and stops workers, so that these directories are run."""
        ...

    def rollout(self, release: Release) -> drafts.Rollout | None:
        """The rollout of the new draft, which is started if it never was. None while no worker of it is seen."""
        ...

    def withdrawn(self) -> set[str]:
        """Names of the drafts that run, and that draft for nobody since their rollout has ended."""
        ...

    def note(self, release: Release) -> None:
        """For the events and the audit."""
        ...

    def clear(self, release: Release) -> None:
        """Removes what only its training needed."""
        ...


@dataclass(slots=True)
class Autopilot:
    world: World
    directory: Path
    """Of the new drafts and of the book."""
    draft: str
    """In use where no release was promoted."""
    budget_s: float
    """For a distillation."""
    clock: Callable[[], float] = time.time
    book: Book = field(init=False)

    def __post_init__(self) -> None:
        self.book = Book.read(self._file)

    @property
    def _file(self) -> Path:
        return self.directory / "autopilot.json"

    def turn(self) -> None:
        """Takes one step, or looks after the one that is under way."""
        release = self.book.release
        self._keep_workers()
        following = self._next(release) if release is not None else self._begin()
        if following is None or following == release:
            return
        # Noted first: an entry may come twice, but none is missing.
        self.world.note(following)
        self.book.release, self.book.number = following, following.number
        if following.step in _LAST:
            self._close(following)
        self.book.write(self._file)

    def _keep_workers(self) -> None:
        with suppress(CommandError):
            self._forget(self.world.withdrawn())
        release, drafts = self.book.release, set(self.book.promoted.values())
        if release is not None and release.step is ReleaseStep.ROLLOUT:
            drafts.add(release.out)
        self.world.keep_workers(drafts)

    def _forget(self, withdrawn: Collection[str]) -> None:
        """Promoted drafts that an operator has undone."""
        kept = {tenant: out for tenant, out in self.book.promoted.items() if Path(out).name not in withdrawn}
        if kept != self.book.promoted:
            self.book.promoted = kept
            self.book.write(self._file)

    def _read_on(self, tenant: str) -> None:
        """While a step reads the tenant's samples. Raises StepFailed once it has withdrawn its consent."""
        self._keep_workers()
        # Without an answer it is asked again in some seconds.
        with suppress(CommandError):
            if not self.world.consents(tenant):
                raise StepFailed("its record does not say `samples: text` any more")

    def held_back(self, fallen: Fallen) -> str:
        """Why no release begins for this tenant; empty: one does."""
        rests_s = self.book.ended_s.get(fallen.tenant, float("-inf")) + REST_S - self.clock()
        if self.book.release is not None:
            return f"{self.book.release.name} is under way, and there is one release at a time"
        if not fallen.consents:
            return "its record does not say `samples: text`"
        if fallen.num_samples < MIN_SAMPLES:
            return f"{fallen.num_samples} samples are recorded, at least {MIN_SAMPLES} are needed"
        return f"its last release has ended; the next may begin in {rests_s / 3600:.1f} h" if rests_s > 0 else ""

    def next_release(self, fallen: Fallen) -> Release:
        number = self.book.number + 1
        out, in_use = str(self.directory / f"{fallen.tenant}-{number}"), self.book.promoted.get(fallen.tenant)
        reason = f"acceptance fell: {fallen.reason}"
        return Release(fallen.tenant, number, in_use or self.draft, out, ReleaseStep.DISTIL, reason, self.clock())

    def _begin(self) -> Release | None:
        ready = (one for one in self.world.fallen() if not self.held_back(one))
        return next(map(self.next_release, ready), None)

    def _next(self, release: Release) -> Release:
        try:
            step, reason = self._step(release)
        except StepFailed as error:
            step, reason = ReleaseStep.ENDED, str(error)
        if step is release.step:
            return release
        return replace(release, step=step, reason=reason, since_s=self.clock())

    def _step(self, release: Release) -> tuple[ReleaseStep, str]:
        """The step that follows, and why. Raises StepFailed."""
        spent_s = self.clock() - release.since_s
        if release.step is ReleaseStep.DISTIL:
            if spent_s >= self.budget_s:
                raise StepFailed(f"its {self.budget_s / 60:.0f} minutes are over")
            self.world.distil(release, self.budget_s - spent_s, partial(self._read_on, release.tenant))
            return ReleaseStep.COMPARE, f"{release.name} is distilled"
        if release.step is ReleaseStep.COMPARE:
            return self._compared(*self.world.compare(release, partial(self._read_on, release.tenant)))
        if (rollout := self.world.rollout(release)) is None:
            if spent_s > _STARTING_S:
                raise StepFailed(f"no worker of {release.name} was seen")
            return ReleaseStep.ROLLOUT, release.reason
        if rollout.state == drafts.ROLLOUT_STATE_RUNNING:
            return ReleaseStep.ROLLOUT, release.reason
        promoted = rollout.state == drafts.ROLLOUT_STATE_PROMOTED
        return ReleaseStep.PROMOTED if promoted else ReleaseStep.ENDED, rollout.reason

    @staticmethod
    def _compared(tokens_per_round: float, in_use: float) -> tuple[ReleaseStep, str]:
        saving, found = 1 / in_use - 1 / tokens_per_round, f"{tokens_per_round:.2f} tokens a round in held-out samples"
        found = f"{found}, {in_use:.2f} with the draft in use: {saving:+.3f} rounds a token"
        return (ReleaseStep.ROLLOUT if saving >= MIN_GAIN else ReleaseStep.ENDED), found

    def _close(self, release: Release) -> None:
        if release.step is ReleaseStep.PROMOTED:
            self.book.promoted[release.tenant] = release.out
        self.book.ended_s[release.tenant] = self.clock()
        self.book.release = None
        self.world.clear(release)
