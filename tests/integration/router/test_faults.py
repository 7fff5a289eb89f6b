"""Workers that die, stall and lie in mid-stream: the client sees the same text, or one clear error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from outrider.errors import Code, OutriderError
from outrider.rpc.v1 import control_pb2, target_pb2
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.router.config import FailoverConfig

from tests.fakes import FakeTarget, continuation
from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import Fleet
from tests.unit.router.made_requests import a_request

PROMPT = [5, 6, 7]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": sequence.Sampling(temperature=0, top_p=1)},
    "coupled": {"sampling": sequence.Sampling(temperature=0.8, top_p=0.95, seed=3), "seeded": True},
    "ratio": {"sampling": sequence.Sampling(temperature=0.8, top_p=0.95)},
}


def truth(count: int) -> list[int]:
    return continuation(PROMPT, count, 1000)


async def collect(call: Any, first: int = 0, then: Callable[[], Any] | None = None) -> list[router.RouteResponse]:
    """All rounds; `then` happens once `first` tokens have come."""
    rounds, count = [], 0
    async for response in call:
        rounds.append(response)
        count += len(response.token_ids)
        if then is not None and count >= first:
            action, then = then, None
            result = action()
            if result is not None:
                await result
    assert then is None, "the request ended before the fault"
    return rounds


def tokens(rounds: list[router.RouteResponse]) -> list[int]:
    return [token for r in rounds for token in r.token_ids]


@pytest.mark.parametrize(("fault", "sampling"), [("kill", "greedy"), ("break_streams", "coupled"), ("freeze", "ratio")])
async def test_no_token_is_lost_or_repeated_when_a_target_fails(fleet: Fleet, fault: str, sampling: str) -> None:
    targets = [await fleet.target(FakeTarget(step_s=0.005)) for _ in range(2)]
    draft = await fleet.draft()
    await fleet.start()

    def fail() -> Any:
        victim = next(t for t in targets if t.live)
        return getattr(victim, fault)()

    rounds = await collect(fleet.call(fleet.request(PROMPT, 120, **SAMPLINGS[sampling])), 40, fail)
    assert tokens(rounds) == truth(120)
    assert rounds[-1].metrics.num_target_failovers == 1
    assert [len(t.opens) for t in targets] == [1, 1]
    first, second = (t.opens[0] for t in targets if t.opens)
    assert first.sampling == second.sampling and first.mode == second.mode
    assert first.sequence_id != second.sequence_id
    assert draft.behind.total() == 0
    assert fleet.counter("outrider_failover_total", role="target") == 1


async def test_late_replies_from_a_target_that_lost_the_sequence_are_dropped_and_counted(fleet: Fleet) -> None:
    stale, other = FakeTarget(step_s=0.003), FakeTarget(step_s=0.003)
    stale.heeds_closes = False
    other.load.num_running = 9
    lied = False

    def lie_once(message: target_pb2.VerifyResponse) -> target_pb2.VerifyResponse:
        nonlocal lied
        for commit in message.commits:
            if commit.base_len > 20 and not lied:
                lied = True
                commit.base_len += 1
        return message

    stale.corrupt = lie_once
    await fleet.target(stale)
    await fleet.target(other)
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 100)))
    assert tokens(rounds) == truth(100)
    assert stale.closes[0].reason == sequence.CLOSE_REASON_MOVED
    assert fleet.counter("outrider_late_replies_total", role="target") > 20


async def test_a_target_may_not_speak_for_a_sequence_opened_elsewhere(fleet: Fleet) -> None:
    honest, liar = await fleet.target(FakeTarget(step_s=0.003)), FakeTarget()
    await fleet.start()
    asking = asyncio.create_task(collect(fleet.call(fleet.request(PROMPT, 400))))
    await until(lambda: honest.num_steps > 3)
    stolen = honest.opens[0].sequence_id

    def steal(message: target_pb2.VerifyResponse) -> target_pb2.VerifyResponse:
        message.commits.add(sequence_id=stolen, base_len=4, token_ids=[1])
        message.errors.add(sequence_id=stolen, code=3, reason="STOLEN", message="gone")
        return message

    liar.corrupt = steal
    honest.load.num_running = 200
    await fleet.target(liar)
    while not liar.opens:
        await fleet.ask(fleet.request([8], 5))
    assert not asking.done()
    assert tokens(await asking) == truth(400)
    assert fleet.counter("outrider_late_replies_total", role="target") >= 2


async def test_a_malformed_commit_moves_the_session_to_another_target(fleet: Fleet) -> None:
    """What else is malformed: tests/unit/router/requests/test_request.py."""
    targets = [FakeTarget(), FakeTarget()]
    targets[1].load.num_running = 9

    def corrupt(message: target_pb2.VerifyResponse) -> target_pb2.VerifyResponse:
        for commit in message.commits:
            if commit.base_len > 20:
                commit.base_len += 1
        return message

    targets[0].corrupt = corrupt
    for target in targets:
        await fleet.target(target)
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 60)))
    assert tokens(rounds) == truth(60)
    assert rounds[-1].metrics.num_target_failovers == 1
    assert [c.reason for c in targets[0].closes] == [sequence.CLOSE_REASON_MOVED]


async def test_a_target_that_is_healthy_and_silent_is_given_up_in_the_end(fleet: Fleet) -> None:
    mute, other = FakeTarget(step_s=0.003), FakeTarget(step_s=0.003)
    other.load.num_running = 9

    async def hush() -> None:
        mute.step_s = 60

    await fleet.target(mute)
    await fleet.target(other)
    await fleet.start(failover=FailoverConfig(stall_after_s=0.1, max_silence_s=1.0))
    started_s = time.monotonic()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 60)), 20, hush)
    assert tokens(rounds) == truth(60)
    assert rounds[-1].metrics.num_target_failovers == 1
    # Its next step would have come after 60 s.
    assert time.monotonic() - started_s < 50


async def test_a_request_that_breaks_every_target_is_tried_on_three_and_then_rejected(fleet: Fleet) -> None:
    targets = [await fleet.target() for _ in range(4)]
    await fleet.start()

    def poison(target: FakeTarget) -> Callable[[target_pb2.VerifyResponse], target_pb2.VerifyResponse]:
        def corrupt(message: target_pb2.VerifyResponse) -> target_pb2.VerifyResponse:
            target.break_streams()
            return message

        return corrupt

    for target in targets:
        target.corrupt = poison(target)
    with pytest.raises(OutriderError) as caught:
        await collect(fleet.call(fleet.request(PROMPT, 60)))
    assert caught.value.reason == "TARGETS_FAILED"
    assert sum(len(t.opens) for t in targets) == 3


async def test_the_only_target_is_asked_again_after_it_failed_once(fleet: Fleet) -> None:
    class FailsOnce(FakeTarget):
        def _refusal(self, opening: Any) -> Any:
            self.refuse_opens = None if self.opens[:-1] else Code.INTERNAL
            return super()._refusal(opening)

    target = await fleet.target(FailsOnce())
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 20)))
    assert tokens(rounds) == truth(20)
    assert len(target.opens) == 2


async def test_a_request_outlives_the_loss_of_all_connections_at_once(fleet: Fleet) -> None:
    """As when the router's own network fails: the request goes to a target that is only thought to be up."""
    targets = [await fleet.target(FakeTarget(step_s=0.005)) for _ in range(2)]
    await fleet.start(failover=FailoverConfig(stall_after_s=0.2))

    async def fail() -> None:
        first = next(t for t in targets if t.live)
        second = next(t for t in targets if t is not first)
        first.break_streams()
        while not second.opens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        second.break_streams()

    rounds = await collect(fleet.call(fleet.request(PROMPT, 60)), 10, fail)
    assert tokens(rounds) == truth(60)
    assert rounds[-1].metrics.num_target_failovers == 2


async def test_a_request_outlives_the_only_target_when_another_comes_in_time(fleet: Fleet) -> None:
    first = await fleet.target(FakeTarget(step_s=0.005))
    await fleet.start()

    async def replace() -> None:
        await first.kill()
        await asyncio.sleep(0.2)
        await fleet.target(FakeTarget(step_s=0.001))

    rounds = await collect(fleet.call(fleet.request(PROMPT, 100)), 30, replace)
    assert tokens(rounds) == truth(100)


async def test_without_any_target_left_the_request_waits_a_bounded_time(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(step_s=0.005))
    await fleet.start(failover=FailoverConfig(wait_for_restart_s=0.3))
    started_s = 0.0

    def kill() -> Any:
        nonlocal started_s
        started_s = time.monotonic()
        return target.kill()

    with pytest.raises(OutriderError) as caught:
        await collect(fleet.call(fleet.request(PROMPT, 100)), 10, kill)
    assert caught.value.code is Code.UNAVAILABLE
    assert 0.25 < time.monotonic() - started_s < 30


async def test_the_only_target_is_waited_for_by_running_answers_and_by_new_requests(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(step_s=0.005))
    router = await fleet.start(failover=FailoverConfig(wait_for_target_s=0.1, wait_for_restart_s=30))
    new = asyncio.Future()

    async def be_away() -> None:
        await target.kill()
        await until(lambda: not router.dispatcher.fleet.live_targets("simulated"))
        new.set_result(asyncio.create_task(fleet.ask(fleet.request([8], 5))))
        # Longer than for a model of which there was none.
        await asyncio.sleep(0.5)
        await fleet.target(FakeTarget(step_s=0.001))

    rounds = await collect(fleet.call(fleet.request(PROMPT, 100)), 30, be_away)
    assert tokens(rounds) == truth(100)
    assert (await new.result()).token_ids == continuation([8], 5, 1000)


async def test_a_target_that_does_not_come_back_is_waited_for_as_long_as_a_restart_may_take(fleet: Fleet) -> None:
    target = await fleet.target()
    router = await fleet.start(failover=FailoverConfig(wait_for_target_s=0.1, wait_for_restart_s=1.0))
    await fleet.ask(fleet.request(PROMPT, 5))
    await target.kill()
    killed_s = time.monotonic()
    await until(lambda: not router.dispatcher.fleet.live_targets("simulated"))
    awaited = router.dispatcher.picker.awaited_models()
    assert [(model.model, model.num_targets) for model in awaited] == [("simulated", 0)]
    for least_s in (0.9, 0.0):
        with pytest.raises(OutriderError) as caught:
            await fleet.ask(fleet.request([8], 5))
        assert caught.value.reason == "NO_TARGET"
        assert time.monotonic() - killed_s > least_s
    assert not router.dispatcher.picker.awaited_models()


async def test_an_operators_cordon_is_told_at_once(fleet: Fleet) -> None:
    """Before a gateway sends the headers of a stream."""
    target = await fleet.target()
    router = await fleet.start(failover=FailoverConfig(wait_for_target_s=300, wait_for_restart_s=300))
    cordon = control_pb2.Cordon(worker_id=target.info.worker_id, reason="a fan is loud")
    await fleet.store.cordons.put(cordon, "cordon worker")
    await until(lambda: router.dispatcher.fleet.loads.cordons)
    async with asyncio.timeout(60):
        with pytest.raises(OutriderError, match="is cordoned") as caught:
            await fleet.ask(fleet.request([8], 5))
    assert caught.value.reason == "NO_TARGET"
    assert caught.value.retry_after_s == pytest.approx(300)


async def test_an_answer_that_another_router_began_waits_as_long(fleet: Fleet) -> None:
    target = await fleet.target()
    await fleet.start(failover=FailoverConfig(wait_for_target_s=0.2, wait_for_restart_s=30))
    await fleet.ask(fleet.request(PROMPT, 5))
    await target.kill()
    resumed = asyncio.create_task(fleet.ask(fleet.request(PROMPT, 20, resume_token_ids=truth(5))))
    await asyncio.sleep(0.5)
    assert not resumed.done()
    await fleet.target()
    assert (await resumed).token_ids == truth(20)[5:]


async def test_a_failover_stays_on_the_same_weights(fleet: Fleet) -> None:
    first = await fleet.target(FakeTarget(step_s=0.005))
    other = FakeTarget(model_revision="2")
    other.load.num_running = 100
    await fleet.target(other)
    await fleet.start(failover=FailoverConfig(wait_for_restart_s=0.3))
    with pytest.raises(OutriderError) as caught:
        await collect(fleet.call(fleet.request(PROMPT, 100)), 10, first.kill)
    assert caught.value.code is Code.UNAVAILABLE
    assert not other.opens


@pytest.mark.parametrize("sampling", [{}, {"sampling": sequence.Sampling(temperature=1, top_p=1), "seeded": True}])
async def test_a_failover_prefers_the_same_arithmetic(fleet: Fleet, sampling: dict[str, Any]) -> None:
    first = await fleet.target(FakeTarget(step_s=0.05, model_revision="w/bfloat16-native-amx"))
    twin = FakeTarget(model_revision="w/bfloat16-native-amx")
    other = FakeTarget(model_revision="w/bfloat16-native-avx2")
    twin.load.num_running = 100
    other.load.num_running = 99
    await fleet.target(twin)
    await fleet.target(other)
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 100, **sampling)), 10, first.kill)
    assert not other.opens
    assert [r.model_revision for r in rounds if r.model_revision] == ["w/bfloat16-native-amx"]
    assert rounds[-1].metrics.num_target_failovers == 1
    assert rounds[-1].metrics.num_revision_changes == 0


async def test_an_answer_that_goes_on_in_another_arithmetic_says_so(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    first = await fleet.target(FakeTarget(step_s=0.005, model_revision="w/bfloat16-native-amx"))
    other = FakeTarget(model_revision="w/bfloat16-native-avx2")
    other.load.num_running = 100
    await fleet.target(other)
    await fleet.start()
    rounds = await collect(fleet.call(fleet.request(PROMPT, 100)), 10, first.kill)
    assert tokens(rounds) == truth(100)
    revisions = [r.model_revision for r in rounds if r.model_revision]
    assert revisions == ["w/bfloat16-native-amx", "w/bfloat16-native-avx2"]
    assert rounds[-1].metrics.num_revision_changes == 1
    assert "goes on as w/bfloat16-native-avx2" in caplog.text


async def test_a_request_resumed_after_a_router_died_stays_on_its_revision(fleet: Fleet) -> None:
    weights, arithmetic = FakeTarget(model_revision="v/1"), FakeTarget(model_revision="w/2")
    same = FakeTarget(model_revision="w/1")
    same.load.num_running = 100
    for target in (weights, arithmetic, same):
        await fleet.target(target)
    await fleet.start()
    begun = truth(10)
    resumed = fleet.request(PROMPT, 30, resume_token_ids=begun, resume_revision="w/1")
    assert begun + tokens(await collect(fleet.call(resumed))) == truth(30)
    assert same.opens and not weights.opens and not arithmetic.opens


async def test_a_request_resumed_where_its_weights_are_gone_is_refused(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(model_revision="v/1"))
    await fleet.start(failover=FailoverConfig(wait_for_restart_s=0.3))
    resumed = fleet.request(PROMPT, 30, resume_token_ids=truth(10), resume_revision="w/1")
    with pytest.raises(OutriderError) as caught:
        await collect(fleet.call(resumed))
    assert caught.value.code is Code.UNAVAILABLE


async def test_a_draining_target_hands_its_sequences_over_without_counting_as_a_failure(fleet: Fleet) -> None:
    leaving, staying = FakeTarget(), FakeTarget()
    leaving.refuse_opens = Code.UNAVAILABLE
    staying.load.num_running = 9
    await fleet.target(leaving)
    await fleet.target(staying)
    await fleet.start(failover=FailoverConfig(max_target_failures=1))
    rounds = await collect(fleet.call(fleet.request(PROMPT, 20)))
    assert tokens(rounds) == truth(20)
    assert len(leaving.opens) == 1


async def test_faults_are_on_the_events_stream(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.005))
    draft = await fleet.draft()
    await fleet.start()
    await collect(fleet.call(fleet.request(PROMPT, 60)), 20, draft.kill)
    events = []
    async with asyncio.timeout(60):
        while not events:
            events = [e for e in await fleet.store.events() if e.kind == "draft_lost"]
    assert events[0].fields["worker_id"] == draft.info.worker_id
    assert events[0].fields["reason"] == "draft_lost"


async def test_thirty_sessions_survive_the_loss_of_a_target_and_of_a_draft(fleet: Fleet) -> None:
    targets = [await fleet.target(FakeTarget(step_s=0.005)) for _ in range(2)]
    drafts = [await fleet.draft() for _ in range(2)]
    running = await fleet.start()
    asking = [asyncio.create_task(fleet.ask(fleet.request([i + 1], 150))) for i in range(30)]
    await until(lambda: all(len(t.live) > 5 for t in targets) and targets[0].num_steps > 5)
    await asyncio.gather(targets[0].kill(), drafts[1].kill())
    answers = await asyncio.gather(*asking)
    for i, answer in enumerate(answers):
        assert answer.token_ids == continuation([i + 1], 150, 1000)
    moved = sum(a.metrics.num_target_failovers for a in answers)
    # An opening that was still on its way when the target died moved too.
    assert moved >= len(targets[0].opens) > 5
    assert fleet.counter("outrider_failover_total", role="target") == moved
    assert not running.dispatcher.table.requests
    await until(lambda: not targets[1].live and not drafts[0].live)


async def test_bytes_that_are_no_message_cost_a_connection_and_not_the_worker(fleet: Fleet) -> None:
    """The only target: its link is made again, and the request goes on where it was."""
    target = await fleet.target(FakeTarget(step_s=0.003))
    await fleet.start()

    def garble_once() -> None:
        def garble(data: bytes) -> bytes:
            target.garble = lambda data: data
            return b"\xff" * 9

        target.garble = garble

    rounds = await collect(fleet.call(fleet.request(PROMPT, 120)), 20, garble_once)
    assert tokens(rounds) == truth(120)
    assert len(target.opens) == 2


async def test_a_target_that_drains_keeps_its_stream_however_long_its_steps_take(fleet: Fleet) -> None:
    """It answers that it takes nothing new, which is an answer."""
    target = FakeTarget(step_s=0.05)
    await fleet.target(target)
    await fleet.start()

    async def drain() -> None:
        target.load.draining = True
        target.step_s = 0.6
        await target.life.drain()

    rounds = await collect(fleet.call(fleet.request(PROMPT, 10)), 7, drain)
    assert tokens(rounds) == truth(10)
    assert len(target.opens) == 1


@pytest.mark.parametrize("num_ticks", range(4))
async def test_a_call_that_is_cancelled_as_a_worker_comes_is_cancelled(fleet: Fleet, num_ticks: int) -> None:
    """While it waits for a target, and is just being woken."""
    dispatcher = (await fleet.start()).dispatcher
    asking = asyncio.create_task(dispatcher.run(a_request(model="simulated"), router.RouteResponse))
    await asyncio.sleep(0.02)
    dispatcher.fleet.notify()
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking}, timeout=1)
    assert asking.cancelled()
