"""What a router tells a plan of its fleet, and what a change of the plan changes for requests under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.limits import MAX_DRAFT_TOKENS
from outrider.metadata import LeaseRecord
from outrider.protocol.rounds import Round
from outrider.rpc.outbox import BatchingOutbox
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import target_pb2 as target
from outrider.rpc.v1 import worker_pb2 as worker
from outrider_controller.autoscaler.evidence import Cell, own_drafts_of
from outrider_controller.autoscaler.plan import Decision, Mode, Reason, TargetState, TenantPolicy, TenantSetting
from outrider_controller.autoscaler.planner import ANYBODY
from outrider_controller.plan_messages import draft_version
from outrider_controller.router.config import PolicyConfig, RouterConfig
from outrider_controller.router.fleet.fleet import Fleet, LeasedDraft, RowPrice
from outrider_controller.router.observe.telemetry import RouterTelemetry
from outrider_controller.router.observe.tracing import now_us
from outrider_controller.router.observe.usage import Account
from outrider_controller.router.requests.sequences import ActiveRequest, OpenTarget, SequenceTable
from outrider_controller.router.requests.settings import SettingsSender
from outrider_controller.router.speculation.policy import Policy
from prometheus_client import CollectorRegistry

from tests.fakes import fake_info
from tests.unit.router.made_requests import a_request, under_way
from tests.unit.router.observe.test_telemetry import NoEvents

TARGET, DRAFT = worker.WORKER_ROLE_TARGET, worker.WORKER_ROLE_DRAFT


@dataclass(eq=False)
class Link:
    """A connection to a target, without a network."""

    info: worker.WorkerInfo
    up: bool = True
    price: RowPrice = field(default_factory=RowPrice)
    load: worker.WorkerLoad = field(default_factory=worker.WorkerLoad)
    open_sequences: set[int] = field(default_factory=set)
    outbox: BatchingOutbox[target.VerifyRequest] = field(default_factory=lambda: BatchingOutbox(target.VerifyRequest))

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    def told(self) -> list[tuple[int, int]]:
        """The settings that were sent: tokens of a draft worker, and of the target's own."""
        sent = [one.speculation for message in self.outbox._waiting for one in message.settings]
        self.outbox.clear()
        return [(one.max_draft_tokens, one.max_own_draft_tokens) for one in sent]


class Router:
    """Its parts, with fleet and requests as a test sets them."""

    def __init__(self) -> None:
        telemetry = RouterTelemetry(CollectorRegistry(), NoEvents())
        self.policy = Policy(PolicyConfig())
        nobody: Any = None
        self.fleet = Fleet(nobody, RouterConfig(), nobody, lambda: None)
        self.table = SequenceTable(telemetry)
        self.settings_sender = SettingsSender(self.policy, self.fleet, self.table, telemetry)

    def target(self, model: str = "m", **info: Any) -> Link:
        link = Link(fake_info(TARGET, model=model, **info))
        self.fleet.targets[link.worker_id] = link  # type: ignore[assignment]
        return link

    def draft(self, model: str = "d", **info: Any) -> LeasedDraft:
        made = fake_info(DRAFT, model=model, **info)
        self.fleet.drafts[made.worker_id] = LeasedDraft(made.worker_id, "h:1", made)
        return self.fleet.drafts[made.worker_id]

    def request(self, link: Link, **fields: Any) -> ActiveRequest:
        active = under_way(a_request(**fields))
        active.target = OpenTarget(len(self.table.requests) + 1, link, Account("t", "w", 0))  # type: ignore[arg-type]
        active.speculation.allow(self.policy.allowance(active.request))
        self.table.requests[active] = None
        return active

    def looked_up(self, *, accepted: int) -> None:
        commit = sequence.Commit(token_ids=range(accepted + 1), num_drafted=4, num_verified=4, num_accepted=accepted)
        commit.sources.add(source="ngram", own=True, num_drafted=4, num_verified=4, num_accepted=accepted)
        self.policy.own_drafts(a_request(), Round.from_commit(commit, 20_000), price=0.2)


def priced(row: float, best_chance: float, age_s: float = 0.0) -> RowPrice:
    return RowPrice(row, best_chance, now_us() / 1e6 - age_s)


async def test_a_plan_is_told_the_versions_of_drafts_that_fit_a_model_and_take_work() -> None:
    router = Router()
    router.target()
    fits, other, gone = router.draft(), router.draft(tokenizer_fingerprint="o" * 16), router.draft("gone")
    gone.leased = False
    leaving = router.draft("leaving")
    router.fleet.loads.report([LeaseRecord(leaving.info, worker.WorkerLoad(draining=True), "h:1", 1)], ())
    assert router.settings_sender.target_states() == {"m": TargetState(frozenset({draft_version(fits.info)}))}
    assert other.leased


async def test_the_price_of_a_model_is_the_least_that_one_of_its_targets_said_lately() -> None:
    router = Router()
    for price in (priced(0.3, 0.7), priced(0.2, 0.6), priced(0.1, 0.9, age_s=10), RowPrice()):
        router.target().price = price
    router.target("down").up = False
    assert router.settings_sender.target_states() == {"m": TargetState(frozenset(), price=0.2, best_chance=0.7)}


async def test_what_targets_draft_themselves_is_a_target_of_its_own_once_a_round_has_shown_it() -> None:
    router = Router()
    router.target().price = priced(0.3, 0.7)
    assert own_drafts_of("m") not in router.settings_sender.target_states()
    router.looked_up(accepted=2)
    # Without a price: what a row costs is a part of the evidence.
    assert router.settings_sender.target_states()[own_drafts_of("m")] == TargetState(frozenset({"ngram"}))


async def test_a_change_of_the_plan_is_sent_to_the_requests_it_decides_for_and_to_no_others() -> None:
    router = Router()
    link = router.target()
    mine, others = router.request(link), router.request(link, tenant="u")
    off = Decision(Mode.OFF, Reason.OPERATOR_OFF, (), TenantPolicy(TenantSetting.OFF))
    router.policy.decisions[Cell("t", "m")] = off
    router.settings_sender.plan_changed([])
    assert link.told() == []
    router.settings_sender.plan_changed([Cell("t", "m")])
    assert link.told() == [(0, 0)] and not mine.lacks_draft and others.lacks_draft
    router.settings_sender.plan_changed([Cell("t", "m")])
    assert link.told() == [], "sent already"
    # The cell of anybody decides for who has none of their own.
    router.policy.decisions[Cell(ANYBODY, "m")] = off
    router.settings_sender.plan_changed([Cell(ANYBODY, "m")])
    assert link.told() == [(0, 0)] and not others.lacks_draft


async def test_a_change_for_the_targets_own_drafts_leaves_those_of_draft_workers() -> None:
    router = Router()
    link = router.target()
    active = router.request(link)
    active.speculation.allow(router.policy.allowance(active.request))
    cell = Cell("t", own_drafts_of("m"))
    for decision, own in (
        (Decision(Mode.TRY, Reason.COSTS, (("ngram", 0.0),)), 0),
        (Decision(Mode.ON, Reason.SAVES, (("ngram", 1.0),)), MAX_DRAFT_TOKENS),
    ):
        router.policy.decisions[cell] = decision
        router.settings_sender.plan_changed([cell])
        [(drafted, told_own)] = link.told()
        assert (active.speculation.allowed.max_draft_tokens, told_own) == (5, own)
        assert drafted == active.speculation.sent.max_draft_tokens


async def test_a_request_that_may_have_a_draft_again_looks_for_one() -> None:
    router = Router()
    link, cell = router.target(), Cell("t", "m")
    router.policy.decisions[cell] = Decision(Mode.OFF, Reason.OPERATOR_OFF, (), TenantPolicy(TenantSetting.OFF))
    active = router.request(link)
    assert not active.lacks_draft
    router.policy.decisions[cell] = Decision(Mode.ON, Reason.OPERATOR_ON, (), TenantPolicy(TenantSetting.ON))
    router.settings_sender.plan_changed([cell])
    await active.events.next()
