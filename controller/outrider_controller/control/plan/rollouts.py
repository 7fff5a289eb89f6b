"""The leader's part of rollouts: collects the evidence of those that run, ends them by its test, and keeps both in the
metadata store, so that the next leader continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from outrider.errors import Unavailable
from outrider.metadata.drafts import DraftStore
from outrider.metadata.event_writer import EventWriter
from outrider.metadata.events import EventKind, FieldValue
from outrider.rpc.v1 import drafts_pb2 as drafts

from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey
from outrider_controller.autoscaler.rollout import Arm, Comparison, Rollout, Stage, Trial

_BY_CONTROL = "control"
_PRODUCTS = ("tokens_tokens", "tokens_cost", "cost_tokens", "cost_cost")


@dataclass(slots=True)
class RolloutLeader:
    """All rollouts, as last read."""

    store: DraftStore
    events: EventWriter
    clock: Callable[[], float]
    stages: dict[str, Rollout] = field(default_factory=dict)
    _current: dict[str, drafts.Rollout] = field(default_factory=dict)
    _trials: dict[str, Trial] = field(default_factory=dict)
    """Of those that run."""
    _unsaved: set[str] = field(default_factory=set)

    async def resume(self) -> None:
        """Continues from the former leader's evidence. Raises Unavailable."""
        self._current, self._trials = {}, {}
        await self.read()
        for draft, kept in (await self.store.evidence()).items():
            if draft in self._trials and kept.started_unix_ms == self._current[draft].started_unix_ms:
                products = {name: getattr(kept, name) for name in _PRODUCTS}
                self._trials[draft] = Trial(_arm(kept.candidate), _arm(kept.incumbent), **products)

    async def read(self, epoch: int = 0) -> bool:
        """Whether any has changed. Keeps the known ones while the store, in which `epoch` leads, is away."""
        try:
            now = await self.store.rollouts(epoch)
        except Unavailable:
            return False
        before, self._current = self._current, now
        if now == before:
            return False
        for draft, rollout in now.items():
            known = before.get(draft)
            if known is None or known.started_unix_ms != rollout.started_unix_ms:
                self._trials[draft] = Trial()
        self.stages = {draft: stage_of(one) for draft, one in now.items() if one.state}
        self._trials = {draft: self._trials.get(draft, Trial()) for draft in self._running()}
        return True

    async def restore(self) -> None:
        """The store has lost its data: writes all again. Raises Unavailable."""
        for rollout in self._current.values():
            await self.store.put_rollout(rollout, "restore rollout", drafts.Rollout())
        self._unsaved = set(self._trials)

    def learn(self, evidence: Mapping[EvidenceKey, Evidence], in_use: Callable[[Cell], str]) -> None:
        """One report of one router. `in_use`: the draft that most of a cell's requests have."""
        for draft in self._running():
            candidate, incumbent = Evidence(), Evidence()
            for key, news in evidence.items():
                if not news.requests or not self.stages[draft].covers(key.tenant):
                    continue
                if key.draft == draft:
                    candidate.merge(news)
                elif key.draft == in_use(key.cell):
                    incumbent.merge(news)
            if candidate.requests or incumbent.requests:
                self._trials[draft].add(candidate, incumbent)
                self._unsaved.add(draft)

    async def decide(self) -> None:
        """Ends those that have a verdict. Raises Unavailable; then the next call does it."""
        for draft in list(self._running()):
            if (verdict := self._trials[draft].verdict()) is None:
                continue
            await self.save()
            before, rollout = self._current[draft], drafts.Rollout()
            rollout.CopyFrom(before)
            rollout.state, rollout.reason = drafts.RolloutState.ValueType(verdict[0].value), verdict[1]
            rollout.by, rollout.changed_unix_ms = _BY_CONTROL, round(self.clock() * 1000)
            if await self.store.put_rollout(rollout, action(rollout), before):
                tell(rollout, self.events)

    async def save(self) -> None:
        saving, self._unsaved = self._unsaved & self._trials.keys(), set()
        if not await self.store.put_evidence({draft: self._evidence(draft) for draft in saving}):
            self._unsaved |= saving

    def _running(self) -> Iterator[str]:
        return (draft for draft, one in self.stages.items() if one.stage is Stage.RUNNING)

    def _evidence(self, draft: str) -> drafts.RolloutEvidence:
        trial = self._trials[draft]
        return drafts.RolloutEvidence(
            started_unix_ms=self._current[draft].started_unix_ms,
            candidate=drafts.RolloutArm(**asdict(trial.candidate)),
            incumbent=drafts.RolloutArm(**asdict(trial.incumbent)),
            **{name: getattr(trial, name) for name in _PRODUCTS},
            **_interval(trial.compare()),
        )


def stage_of(rollout: drafts.Rollout) -> Rollout:
    """What the plan needs of it. An unknown state of a later release counts as undone."""
    stage = {stage.value: stage for stage in Stage}.get(rollout.state, Stage.UNDONE)
    return Rollout(rollout.draft, rollout.tenant, rollout.share, stage)


def action(rollout: drafts.Rollout) -> str:
    """For the audit."""
    words = {Stage.RUNNING: "start", Stage.PROMOTED: "promote", Stage.UNDONE: "undo", Stage.GIVEN_UP: "give up"}
    return f"{words[stage_of(rollout).stage]} rollout"


def tell(rollout: drafts.Rollout, events: EventWriter) -> None:
    fields: dict[str, FieldValue] = {
        "draft": rollout.draft,
        "state": stage_of(rollout).stage.name.lower(),
        "share": rollout.share,
        "reason": rollout.reason,
        "by": rollout.by,
    }
    if rollout.tenant:
        fields["tenant"] = rollout.tenant
    events.emit(EventKind.ROLLOUT_CHANGED, fields)


def _interval(found: Comparison | None) -> dict[str, float]:
    return {} if found is None else asdict(found)


def _arm(message: drafts.RolloutArm) -> Arm:
    return Arm(**{name: getattr(message, name) for name in asdict(Arm())})
