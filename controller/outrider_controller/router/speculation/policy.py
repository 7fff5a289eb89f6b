"""The speculation that each request may use: the least that its client, operators and the plan allow.

The plan comes from the control plane. A router that has been without one for `LEADER_GONE_S` makes the same plan from
its own evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.limits import MAX_DRAFT_TOKENS, MAX_SOURCES
from outrider.metadata.leader import LEADER_GONE_S
from outrider.protocol.rounds import Round
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import worker_pb2 as worker

from outrider_controller.autoscaler.evidence import Cell, Evidence, EvidenceKey, own_drafts_of
from outrider_controller.autoscaler.plan import Decision, Mode, Reason, TargetState, TenantPolicy, TenantSetting
from outrider_controller.autoscaler.planner import ANYBODY, DecayedSums, Planner
from outrider_controller.plan_messages import draft_version
from outrider_controller.router.config import PolicyConfig
from outrider_controller.router.request.checks import Request
from outrider_controller.router.speculation.controller import Allowance
from outrider_controller.router.speculation.gain import DraftRecord

# Drafts of tenants whose measurements a router keeps, those of the last requests.
_MAX_RECORDS = 8192
_UNPLANNED = Decision(Mode.ON, Reason.UNKNOWN, saving=0.5)


@dataclass(slots=True)
class Policy:
    """One per router."""

    config: PolicyConfig
    led: bool = False
    """Whether the control plane's decisions are followed."""
    decisions: dict[Cell, Decision] = field(default_factory=dict)
    _records: dict[EvidenceKey, DraftRecord] = field(default_factory=dict)
    _planner: Planner = field(default_factory=Planner)
    _sums: dict[EvidenceKey, Sequence[float]] = field(default_factory=dict)
    """Received with decisions; this router plans from them if it loses the control plane."""
    own_sources: dict[str, set[str]] = field(default_factory=dict)
    """By model: the sources of drafts that its targets have made themselves."""
    _left_s: float | None = None
    """When the leading control plane was lost."""

    def record(self, tenant: str, target: str, draft: worker.WorkerInfo) -> DraftRecord:
        """The measurements that this tenant's requests share for this draft version."""
        return self._record(EvidenceKey(tenant, target, draft_version(draft)))

    def missed(self, request: Request, draft: str | None) -> None:
        """Counts a round for which no worker of the planned draft version was found."""
        if draft is not None:
            self._record(EvidenceKey(request.tenant, request.model, draft)).evidence.missed += 1

    def own_drafts(self, request: Request, done: Round, price: float) -> None:
        """Counts what the target's own drafts saved in a round: each accepted token, less the price of
        each row. They come before the step and are never waited for."""
        for one in done.sources:
            if not one.own:
                continue
            known = self.own_sources.setdefault(request.model, set())
            if one.source in known or len(known) < MAX_SOURCES:
                known.add(one.source)
                self._record(EvidenceKey(request.tenant, own_drafts_of(request.model), one.source)).evidence.add_rounds(
                    rounds=1,
                    tokens=done.num_tokens,
                    saved=one.num_accepted - price * one.num_drafted,
                    # Alternatives at one place are one verified token.
                    verified=min(one.num_verified, done.num_verified),
                    accepted=one.num_accepted,
                )

    def _record(self, key: EvidenceKey) -> DraftRecord:
        record = self._records.pop(key, None) or DraftRecord()
        if len(self._records) >= _MAX_RECORDS:
            del self._records[next(iter(self._records))]
        self._records[key] = record
        return record

    def decision(self, tenant: str, target: str) -> Decision:
        decisions = self.decisions
        return decisions.get(Cell(tenant, target)) or decisions.get(Cell(ANYBODY, target)) or _UNPLANNED

    def decides(self, cells: Collection[Cell], tenant: str, target: str) -> bool:
        """Whether one of these cells decides for the tenant: its own, or without one the cell for any tenant."""
        own = Cell(tenant, target)
        return own in cells or (Cell(ANYBODY, target) in cells and own not in self.decisions)

    def allowance(self, request: Request) -> Allowance:
        decision, config = self.decision(request.tenant, request.model), self.config
        policy = self._tenant_policy(request)
        forced = policy.speculation
        asks_on = request.choice == router.SPECULATION_MODE_ON and not policy.on_counts_as_auto
        always = forced is TenantSetting.ON or (forced is TenantSetting.AUTO and asks_on)
        # Beyond its row, one more token of a lookup costs nothing: where nobody asks for a bound, the price decides.
        asked = [bound for bound in (request.max_draft_tokens, policy.cap) if bound is not None]
        most_own = min(asked, default=MAX_DRAFT_TOKENS) if config.max_draft_tokens else 0
        off = request.choice == router.SPECULATION_MODE_OFF or forced is TenantSetting.OFF
        allowed = Allowance(
            max_draft_tokens=min([config.max_draft_tokens, *asked]),
            max_own_draft_tokens=0 if off or not (always or self._own_drafts_pay(request)) else most_own,
            max_wait_us=config.max_wait_us
            if policy.max_wait_us is None
            else min(config.max_wait_us, policy.max_wait_us),
            always_draft=always,
            weight=policy.weight,
            min_acceptance=policy.min_acceptance,
            draft=decision.draft_for(request.request_id, always=always),
        )
        if off or not (always or allowed.draft is not None or _undecided(decision)):
            return replace(allowed, max_draft_tokens=0)
        return allowed

    def _tenant_policy(self, request: Request) -> TenantPolicy:
        """What operators have set. Where no draft worker has ever fitted the target, it is known of its own drafts."""
        decision = self.decision(request.tenant, request.model)
        if decision is _UNPLANNED:
            decision = self.decision(request.tenant, own_drafts_of(request.model))
        return decision.policy

    def _own_drafts_pay(self, request: Request) -> bool:
        """By their own evidence, whatever drafts elsewhere save."""
        decision = self.decision(request.tenant, own_drafts_of(request.model))
        # No source: no router has seen one since it began, and it cannot see one before they are allowed.
        unknown = decision is _UNPLANNED or decision.reason is Reason.NO_DRAFT
        return unknown or decision.draft_for(request.request_id) is not None

    def counts_on_as_auto(self, request: Request) -> bool:
        """Whether the client asked for `on`, which its tenant's policy treats as `auto`."""
        policy = self._tenant_policy(request)
        return request.choice == router.SPECULATION_MODE_ON and policy.on_counts_as_auto

    # -- evidence and plan

    def evidence(self) -> dict[EvidenceKey, Evidence]:
        """The requests' evidence since the last call."""
        return {
            key: record.take()
            for key, record in self._records.items()
            if record.evidence.rounds or record.evidence.missed or record.evidence.requests
        }

    def follow(self, decisions: Mapping[Cell, Decision], sums: Iterable[DecayedSums]) -> None:
        """Takes the control plane's decisions, and the evidence from which this router would plan alone."""
        self.led, self._left_s = True, None
        self.decisions.update(decisions)
        self._sums.update(sums)

    def forget(self, cells: Collection[Cell]) -> None:
        """Drops the cells of deleted tenants."""
        for cell in cells:
            self.decisions.pop(cell, None)
            for key in [one for one in self._sums if one.cell == cell]:
                del self._sums[key]

    def lost(self, now_s: float) -> None:
        """The connection to the control plane was lost."""
        if self.led:
            self.led, self._left_s = False, now_s

    def replan(self, states: Mapping[str, TargetState], now_s: float) -> Collection[Cell]:
        """The cells whose decisions changed. None while the control plane decides, or was lost only recently."""
        if self.led or (self._left_s is not None and now_s - self._left_s < LEADER_GONE_S):
            return ()
        if self._left_s is not None:
            self._left_s = None
            self._planner.resume(self.decisions, self._sums.items(), now_s)
        self._planner.learn(self.evidence())
        tenants = {cell.tenant: decision.policy for cell, decision in self.decisions.items()}
        changed = self._planner.step(tenants, states, now_s)
        self.decisions.update(changed)
        return changed


def _undecided(decision: Decision) -> bool:
    """No decision yet, or one made when there was no draft: one may have come, so the expected saving counts."""
    return decision.saving > 0 and (decision is _UNPLANNED or decision.reason is Reason.NO_DRAFT)
