"""A target and its drafts: what it says to them, what becomes of what they say, and how a target leaves a draft."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from outrider.drafting.pool import DraftLeases
from outrider.drafting.source import Features
from outrider.errors import Code
from outrider.metadata import LeaseRecord
from outrider.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2, worker_pb2
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.sequence.key import Finish
from outrider.sim.clock import VirtualLoop, run_virtually
from outrider.target.drafts.pool import PoolDrafts
from outrider.target.requests.events import Offered, Paired
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.target.requests.wire import events_of
from outrider.tree import DraftTree
from outrider.worker.events import Failed, Opened, SequenceKey

from tests.simulation.network import Host, Network

LIMITS = Limits(vocab_size=1000, max_context_len=512, block_size=16, num_blocks=64)
KEY = SequenceKey(7, 1)
ADDRESS = "draft:7000"
GREEDY = sequence.VERIFICATION_MODE_GREEDY


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Writes down what it hears, and says what it is told to."""

    def __init__(self) -> None:
        self.requests: list[draft_pb2.DraftRequest] = []
        self.context: Any = None
        self.ended = False

    async def GetInfo(self, request: object, context: object) -> draft_pb2.DraftServiceGetInfoResponse:
        return draft_pb2.DraftServiceGetInfoResponse(info=worker_pb2.WorkerInfo(worker_id="d1"))

    async def Draft(self, requests: Any, context: Any) -> None:
        self.context = context
        try:
            async for request in requests:
                self.requests.append(request)
        finally:
            self.ended = True

    @property
    def opens(self) -> list[sequence.OpenSequence]:
        return [opening for request in self.requests for opening in request.opens]

    @property
    def commits(self) -> list[sequence.Commit]:
        return [commit for request in self.requests for commit in request.commits]

    @property
    def settings(self) -> list[sequence.SetSpeculation]:
        return [setting for request in self.requests for setting in request.settings]

    @property
    def closes(self) -> list[tuple[int, int]]:
        return [(close.sequence_id, close.reason) for request in self.requests for close in request.closes]

    async def say(self, *drafts: sequence.Draft, errors: Any = (), usage: Any = ()) -> None:
        await self.context.write(draft_pb2.DraftResponse(drafts=drafts, errors=errors, usage=usage))
        await asyncio.sleep(0.1)


@dataclass
class World:
    draft: ScriptedDraft = field(default_factory=ScriptedDraft)
    draft_host: Host = field(default_factory=lambda: Host("draft"))
    network: Network = field(default_factory=lambda: Network(random.Random(0), (0.001, 0.002)))
    events: list[Any] = field(default_factory=list)
    answers: list[tuple[int, target_pb2.VerifyResponse]] = field(default_factory=list)
    leased: dict[str, str] = field(default_factory=lambda: {"d1": ADDRESS})
    reads_bits: int = 0
    asks: str = ""
    """The features that drafts ask for; the target computes those of `abc`."""
    num_reads: int = 0
    tokens: dict[SequenceKey, list[int]] = field(default_factory=dict)
    """Those of the target."""

    def __post_init__(self) -> None:
        server = self.network.listen(self.draft_host, ADDRESS)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self.draft, server)
        connect: Any = partial(self.network.channel, Host("target"))
        clock = asyncio.get_running_loop().time
        answer = lambda stream, response: self.answers.append((stream, response))  # noqa: E731
        leases = DraftLeases(self.read_leases, clock)
        self.drafts = PoolDrafts(LIMITS, clock, self.events.extend, answer, leases, connect, features="abc")

    async def read_leases(self) -> list[LeaseRecord]:
        self.num_reads += 1
        await asyncio.sleep(0.01)
        reads: dict[str, Any] = {"features": self.asks, "feature_bits": self.reads_bits}
        infos = {name: worker_pb2.WorkerInfo(worker_id=name, **reads) for name in self.leased}
        return [LeaseRecord(infos[name], worker_pb2.WorkerLoad(), at, 1) for name, at in self.leased.items()]

    def apply(self, message: target_pb2.VerifyRequest) -> None:
        events = list(events_of(message, KEY.stream, LIMITS, 0.0))
        self.tokens |= {event.key: event.tokens for event in events if isinstance(event, Opened)}
        self.drafts.apply(KEY.stream, message, events)

    async def hear(self, **request: Any) -> None:
        self.apply(target_pb2.VerifyRequest(**request))
        await asyncio.sleep(0.1)

    async def paired(self, **draft: Any) -> None:
        await self.hear(opens=[opening()], set_drafts=[assigned(**draft)])

    async def follow(self, *commits: StepRow[None], failures: Any = ()) -> Any:
        for row in commits:
            self.tokens[row.key].extend(row.token_ids)
        self.drafts.take_report(TargetReport(commits=list(commits), failures=list(failures)))
        await asyncio.sleep(0.1)
        return next((row.draft_stats for row in commits if row.key == KEY), None)

    @property
    def faults(self) -> list[tuple[int, str]]:
        return [(e.sequence_id, e.reason) for stream, answer in self.answers for e in answer.draft_errors]


def opening(**fields: Any) -> sequence.OpenSequence:
    given = {"sequence_id": KEY.sequence_id, "prompt_token_ids": [5, 6, 7], "committed_token_ids": [8]}
    given |= {"mode": GREEDY, "sampling": sequence.Sampling(top_p=1.0)} | fields
    stopping = sequence.Stopping(max_new_tokens=100)
    return sequence.OpenSequence(**given, stopping=stopping, speculation=sequence.Speculation(max_draft_tokens=4))


def assigned(sequence_id: int = KEY.sequence_id, /, **fields: Any) -> target_pb2.SetDraft:
    given = {"address": ADDRESS, "worker_id": "d1", "sequence_id": 90} | fields
    return target_pb2.SetDraft(sequence_id=sequence_id, draft=sequence.DraftAssignment(**given))


def committed(
    base_len: int, tokens: list[int], *, drafted: int = 0, serial: int = 0, finish: Finish = Finish.NONE
) -> StepRow[None]:
    accepted = range(max(0, min(drafted, len(tokens) - 1)))
    draft = DraftTree(base_len, (9,) * drafted, serial=serial)
    return StepRow(
        sequence=None, key=KEY, base_len=base_len, draft=draft, token_ids=tokens, accepted=accepted, finish=finish
    )


def guess(base_len: int, *tokens: int, **fields: Any) -> sequence.Draft:
    return sequence.Draft(sequence_id=90, base_len=base_len, token_ids=tokens, draft_us=300, compute_us=200, **fields)


def virtual(test: Any) -> Any:
    """Runs it in virtual time, with a world of its own that is stopped at the end."""

    def run() -> None:
        async def main() -> None:
            world = World()
            try:
                await test(world)
            finally:
                await world.drafts.stop()

        run_virtually(main(), VirtualLoop())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_a_draft_hears_the_opening_with_all_that_was_committed_meanwhile(world: World) -> None:
    await world.hear(opens=[opening()])
    assert await world.follow(committed(4, [9, 10])) is None
    await world.hear(set_drafts=[assigned()])
    assert [(o.sequence_id, list(o.committed_token_ids)) for o in world.draft.opens] == [(90, [8, 9, 10])]
    await world.follow(committed(6, [11]))
    assert [(c.sequence_id, c.base_len, list(c.token_ids)) for c in world.draft.commits] == [(90, 6, [11])]


@virtual
async def test_an_opening_names_its_draft_which_is_not_told_of_itself(world: World) -> None:
    await world.hear(opens=[opening(draft=assigned().draft)])
    [opened] = world.draft.opens
    assert (opened.sequence_id, opened.HasField("draft")) == (90, False)


@virtual
async def test_what_a_draft_says_is_offered_to_the_target_and_timed(world: World) -> None:
    await world.paired()
    await world.follow(committed(4, [9]))
    await world.draft.say(guess(5, 20, 21, source="model"))
    [event] = world.events
    assert isinstance(event, Offered)
    assert (event.key, event.tree.base_len, event.tree.token_ids, event.tree.serial) == (KEY, 5, (20, 21), 1)
    stats = await world.follow(committed(5, [20, 30], drafted=2, serial=1))
    assert (stats.draft_us, stats.compute_us, stats.source) == (300, 200, "model")
    assert (stats.answer_tokens, stats.answer_compute_us) == (2, 200)
    # Two ways of 1 to 2 ms, and the 0.1 s between the commit and the scripted answer.
    assert 100_000 < stats.answer_us < 106_000
    assert stats.wire_us == stats.answer_us - 300
    # Told once.
    assert await world.follow(committed(7, [31])) is None


@virtual
async def test_a_guess_that_nobody_asked_for_is_no_answer(world: World) -> None:
    await world.paired()
    await world.draft.say(guess(6, 20))
    stats = await world.follow(committed(6, [20, 30], drafted=1, serial=1))
    assert (stats.draft_us, stats.wire_us, stats.answer_us, stats.answer_tokens) == (300, 0, 0, 0)


@virtual
async def test_a_tree_counts_as_deep_as_it_is(world: World) -> None:
    await world.paired()
    await world.follow(committed(4, [9]))
    await world.draft.say(guess(5, 20, 21, 22, parents=[-1, -1, 0], confidence=[0.6, 0.3, 0.9]))
    stats = await world.follow(committed(5, [20, 22, 30], drafted=2, serial=1))
    assert stats.answer_tokens == 2


@virtual
async def test_only_what_concerns_a_draft_is_handed_on(world: World) -> None:
    await world.paired()
    for wait_us, most in ((100, 4), (200, 4), (200, 2)):
        speculation = sequence.Speculation(max_draft_tokens=most, max_wait_us=wait_us)
        await world.hear(settings=[sequence.SetSpeculation(sequence_id=KEY.sequence_id, speculation=speculation)])
    assert [(s.sequence_id, s.speculation.max_draft_tokens) for s in world.draft.settings] == [(90, 2)]


ENDS = {
    "finished": (lambda w: w.follow(committed(4, [9], finish=Finish.STOP)), sequence.CLOSE_REASON_FINISHED),
    "failed": (lambda w: w.follow(failures=[Failed(KEY, ValueError())]), sequence.CLOSE_REASON_MOVED),
    "closed": (
        lambda w: w.hear(closes=[sequence.CloseSequence(sequence_id=1, reason=sequence.CLOSE_REASON_DEADLINE)]),
        sequence.CLOSE_REASON_DEADLINE,
    ),
    "unpaired": (
        lambda w: w.hear(set_drafts=[target_pb2.SetDraft(sequence_id=KEY.sequence_id)]),
        sequence.CLOSE_REASON_MOVED,
    ),
    "paired anew": (lambda w: w.hear(set_drafts=[assigned(sequence_id=91)]), sequence.CLOSE_REASON_MOVED),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_pairing_that_ends_is_closed_at_the_draft(end: str) -> None:
    @virtual
    async def scenario(world: World) -> None:
        await world.paired()
        act, reason = ENDS[end]
        await act(world)
        assert world.draft.closes == [(90, reason)]
        # What the draft says after that concerns nobody.
        await world.draft.say(guess(4, 20))
        assert not world.events
        assert not world.faults
        # No commit goes there either.
        await world.follow(committed(4, [9]))
        assert not [c for c in world.draft.commits if c.sequence_id == 90]

    scenario()


@virtual
async def test_a_router_that_is_gone_takes_its_pairings_with_it(world: World) -> None:
    await world.paired()
    world.drafts.stream_ended(KEY.stream)
    await asyncio.sleep(0.1)
    assert world.draft.closes == [(90, sequence.CLOSE_REASON_CANCELLED)]
    assert not world.drafts._open


@virtual
async def test_a_malformed_guess_ends_the_pairing_and_names_the_field(world: World) -> None:
    await world.paired()
    await world.draft.say(guess(4, 5000))
    [(stream, answer)] = world.answers
    [error] = answer.draft_errors
    assert (stream, error.sequence_id, error.field) == (KEY.stream, 90, "token_ids[0]")
    assert not world.events and world.drafts._stats.num_refused_drafts == 1
    assert world.draft.closes == [(90, sequence.CLOSE_REASON_MOVED)]
    assert list(world.drafts._open) == [KEY], "the sequence itself goes on"


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("source", {"source": "n" * 10_000_000}),
        ("epoch", {"epoch": 1}),
        ("token_ids", {"token_ids": [9] * 5}),
        ("q", {"q": [sequence.DraftDistribution(token_ids=[9], counts=[65536])]}),
        ("confidence", {"confidence": [2.0]}),
    ],
    ids=["source", "epoch", "token_ids", "q", "confidence"],
)
def test_one_guess_that_no_draft_would_send_costs_its_own_sequence_the_draft_and_no_other(
    field: str, bad: dict[str, Any]
) -> None:
    @virtual
    async def test(world: World) -> None:
        openings = [opening(mode=GREEDY), opening(mode=GREEDY, sequence_id=2)]
        await world.hear(opens=openings, set_drafts=[assigned(), assigned(2, sequence_id=91)])
        await world.draft.say(guess(4, 9, epoch=2))
        fields = {"sequence_id": 90, "base_len": 4, "token_ids": [9], "epoch": 2} | bad
        await world.draft.say(sequence.Draft(**fields), sequence.Draft(sequence_id=91, base_len=4, token_ids=[9]))
        [(_, answer)] = world.answers
        assert [(error.sequence_id, error.field) for error in answer.draft_errors] == [(90, field)]
        assert answer.ByteSize() < 4_000
        assert [event.key.sequence_id for event in world.events if isinstance(event, Offered)] == [1, 2]

    test()


@virtual
async def test_a_draft_may_say_as_much_as_it_was_told_of_at_most(world: World) -> None:
    await world.paired()
    less = sequence.Speculation(max_draft_tokens=1)
    await world.hear(settings=[sequence.SetSpeculation(sequence_id=KEY.sequence_id, speculation=less)])
    await world.draft.say(guess(4, 9, 9, 9, 9))
    assert len(world.events) == 1, "it was on its way when the limit fell"
    more = sequence.Speculation(max_draft_tokens=6)
    await world.hear(settings=[sequence.SetSpeculation(sequence_id=KEY.sequence_id, speculation=more)])
    await world.draft.say(guess(4, *[9] * 6))
    assert len(world.events) == 2 and not world.answers
    await world.draft.say(guess(4, *[9] * 7))
    assert world.faults == [(90, "INVALID_FIELD")]


@virtual
async def test_a_draft_s_error_is_handed_on_at_a_length_that_fits(world: World) -> None:
    await world.paired()
    text = "x" * 5_000_000
    error = sequence.SequenceError(sequence_id=90, code=3, reason=text, field=text, message=text)
    await world.draft.say(errors=[error])
    [(_, answer)] = world.answers
    assert answer.ByteSize() < 4_000


@virtual
async def test_a_draft_that_floods_is_not_remembered_word_by_word(world: World) -> None:
    await world.paired()
    await world.draft.say(*(guess(4, 9) for _ in range(1000)))
    [pooled] = [found.pooled for found in world.drafts._open.values()]
    assert pooled is not None and len(pooled.log._sent) <= 256
    # The last one is still known.
    assert await world.follow(committed(4, [9, 10], drafted=1, serial=1000)) is not None


@virtual
async def test_what_a_draft_refuses_is_handed_to_the_router(world: World) -> None:
    await world.paired()
    code = Code.RESOURCE_EXHAUSTED
    await world.draft.say(errors=[sequence.SequenceError(sequence_id=90, code=code, reason="OVERLOADED")])
    assert world.faults == [(90, "OVERLOADED")]


@virtual
async def test_a_draft_that_dies_is_gone_and_may_be_paired_again_when_it_is_back(world: World) -> None:
    await world.paired()
    for stream in list(world.draft_host.streams):
        stream.break_off("reset")
    await asyncio.sleep(0.1)
    assert world.faults == [(90, "DRAFT_GONE")]
    await world.hear(set_drafts=[assigned(sequence_id=91)])
    assert [o.sequence_id for o in world.draft.opens] == [90, 91]


@virtual
async def test_who_cannot_be_reached_was_never_there(world: World) -> None:
    await world.paired(address="nowhere:1")
    await asyncio.sleep(5)
    assert world.faults == [(90, "DRAFT_UNREACHABLE")]


@virtual
async def test_another_worker_at_the_address_is_not_the_one_that_was_meant(world: World) -> None:
    await world.paired(worker_id="d0")
    assert world.faults == [(90, "DRAFT_UNREACHABLE")]
    assert not world.draft.opens


@virtual
async def test_a_draft_that_is_silent_and_does_not_answer_is_given_up(world: World) -> None:
    await world.paired()
    # Silent alone is what a paused draft is.
    await asyncio.sleep(10)
    assert not world.faults
    world.draft_host.silent_until_s = asyncio.get_running_loop().time() + 60
    await asyncio.sleep(5)
    assert world.faults == [(90, "DRAFT_GONE")]


@virtual
async def test_a_draft_that_owes_an_answer_for_two_minutes_is_given_up(world: World) -> None:
    await world.paired()
    await asyncio.sleep(100)
    await world.draft.say(guess(4))
    await asyncio.sleep(200)
    assert not world.faults, "it has answered, and was not asked again"
    await world.follow(committed(4, [9]))
    await asyncio.sleep(110)
    assert not world.faults
    await asyncio.sleep(15)
    assert world.faults == [(90, "DRAFT_GONE")]


@virtual
async def test_a_fault_in_hearing_ends_the_link_and_not_only_its_task(world: World) -> None:
    await world.paired()
    world.drafts._post = lambda events: {}["no"]
    await world.draft.say(guess(4, 20))
    assert world.faults == [(90, "DRAFT_GONE")]


@virtual
async def test_the_answer_to_an_opening_is_no_turnaround(world: World) -> None:
    await world.paired()
    await world.draft.say(guess(4, 20))
    stats = await world.follow(committed(4, [20, 30], drafted=1, serial=1))
    assert (stats.answer_us, stats.answer_tokens) == (0, 0)
    assert stats.wire_us > 0


@virtual
async def test_an_id_is_open_at_a_draft_only_once(world: World) -> None:
    await world.paired()
    await world.hear(opens=[opening(sequence_id=2)], set_drafts=[assigned(2)])
    [(_, answer)] = world.answers
    assert answer.draft_errors[0].field == "draft.sequence_id"
    assert len(world.draft.opens) == 1


@virtual
async def test_the_pairing_asked_for_last_is_the_one_that_counts(world: World) -> None:
    world.apply(target_pb2.VerifyRequest(opens=[opening()], set_drafts=[assigned()]))
    await world.hear(set_drafts=[assigned(sequence_id=91)])
    await asyncio.sleep(0.2)
    assert [o.sequence_id for o in world.draft.opens] == [91]


@virtual
async def test_a_link_with_nothing_open_on_it_is_closed_after_a_while(world: World) -> None:
    await world.paired()
    await asyncio.sleep(100)
    assert not world.draft.ended, "its sequence is paused"
    await world.hear(closes=[sequence.CloseSequence(sequence_id=KEY.sequence_id)])
    await asyncio.sleep(20)
    assert not world.draft.ended
    await asyncio.sleep(20)
    assert world.draft.ended and not world.drafts.links.by_draft and not world.answers
    await world.paired(sequence_id=91)
    assert world.draft.opens[-1].sequence_id == 91


@virtual
async def test_there_are_only_so_many_links(world: World) -> None:
    numbers = range(2, 302)
    world.leased = {f"d{number}": f"draft{number}:7000" for number in numbers}
    silent = asyncio.Event()
    world.drafts.links._connect = lambda address: _Silent(silent)  # type: ignore[assignment,return-value]
    changes = [assigned(n, worker_id=f"d{n}", address=world.leased[f"d{n}"], sequence_id=n) for n in numbers]
    await world.hear(opens=[opening(sequence_id=number) for number in numbers], set_drafts=changes)
    assert len(world.drafts.links.by_draft) == 256
    assert len(world.faults) == 300 - 256


class _Silent:
    """A channel that does not come up."""

    def __init__(self, up: asyncio.Event) -> None:
        self._up = up

    async def __aenter__(self) -> None:
        await self._up.wait()

    async def __aexit__(self, *exception: object) -> None: ...


@virtual
async def test_stopping_ends_the_streams(world: World) -> None:
    await world.paired()
    await world.drafts.links.stop()
    await asyncio.sleep(0.1)
    assert world.draft.ended


@virtual
async def test_what_a_draft_spent_is_told_with_the_next_commit_and_what_comes_late_by_itself(world: World) -> None:
    await world.paired()
    await world.draft.say(guess(4, 9, 9, share_us=300), sequence.Draft(sequence_id=90, base_len=4, share_us=50))
    taken = committed(4, [9, 5], drafted=2, serial=1)
    stats = await world.follow(replace(taken, draft=replace(taken.draft, seconds=0.0003)))
    assert (stats.share_us, stats.useful_us) == (350, 150)
    await world.draft.say(guess(6, 9, share_us=40))
    await world.hear(closes=[sequence.CloseSequence(sequence_id=KEY.sequence_id)])
    await world.draft.say(guess(7, 9, share_us=20), usage=[sequence.SequenceUsage(sequence_id=90, share_us=5)])
    # Of what was never open there, nothing is known.
    await world.draft.say(usage=[sequence.SequenceUsage(sequence_id=91, share_us=5)])
    # More messages than may wait for a router are one to it.
    await world.draft.say(*[sequence.Draft(sequence_id=90, share_us=1)] * 5000)
    told = [(stream, list(answer.usage)) for stream, answer in world.answers if answer.usage]
    late = [sequence.SequenceUsage(sequence_id=KEY.sequence_id, draft_share_us=us) for us in (40, 25, 5000)]
    assert told == [(KEY.stream, [one]) for one in late]


@virtual
async def test_a_draft_that_asks_for_them_is_sent_features_and_no_other(world: World) -> None:
    """And none of a step that ran before the draft was paired."""
    late, *shown = [Features(2, b"\x05\x06"), Features(0, b"\x01\x02", first=True), Features(3, b"\x03\x04")]
    for asks, bits in (("", 8), ("other", 8), ("abc", 8), ("abc", 0)):
        world.asks, world.reads_bits, world.draft.requests = asks, bits, []
        world.events.clear()
        await asyncio.sleep(6)
        await world.paired()
        # One of an earlier release says nothing of bits.
        paired = [event for event in world.events if isinstance(event, Paired)]
        assert paired == ([Paired(KEY, bits or 16)] if asks == "abc" else [])
        world.drafts.take_report(TargetReport(features=[(KEY, 4, each) for each in (late, *shown)]))
        await world.follow(committed(4, [9]))
        sent = [(c.base_len, list(c.token_ids), c.features_start, c.features) for c in world.draft.commits]
        assert sent == [*((4, [], each.start, each.rows) for each in shown if asks == "abc"), (4, [9], 0, b"")]
        await world.hear(closes=[sequence.CloseSequence(sequence_id=KEY.sequence_id)])
