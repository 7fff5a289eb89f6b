"""Requests through a real router to simulated workers, all over gRPC."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from outrider.errors import Code, OutriderError
from outrider.limits import MAX_CLIENT_STOP_TOKENS
from outrider.metadata import MetadataStore
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider_controller.router.config import AdmissionConfig, FailoverConfig

from tests.fakes import FakeDraft, FakeTarget, continuation, next_token
from tests.integration.gateway.scripted_router import until
from tests.integration.router.conftest import Fleet
from tests.redis_server import EmbeddedServer


async def refusal_of(fleet: Fleet, request: Any, **options: Any) -> Any:
    with pytest.raises(OutriderError) as caught:
        await fleet.ask(request, **options)
    return caught.value


async def test_text_is_the_targets_with_and_without_speculation(fleet: Fleet) -> None:
    target, draft = await fleet.target(), await fleet.draft()
    await fleet.start()
    truth = continuation([5, 6, 7], 40, target.info.vocab_size)

    plain = await fleet.ask(fleet.request(speculation=router.SPECULATION_MODE_OFF))
    assert plain.token_ids == truth
    assert len(plain.rounds) == 40
    assert not draft.opens

    drafted = await fleet.ask(fleet.request(speculation=router.SPECULATION_MODE_ON))
    assert drafted.token_ids == truth
    assert len(drafted.rounds) < 40
    assert drafted.metrics.num_accepted_draft_tokens > 0
    assert draft.behind.total() == 0


async def test_only_the_last_round_carries_the_finish_and_the_sums(fleet: Fleet) -> None:
    await fleet.target()
    await fleet.draft()
    await fleet.start()
    answer = await fleet.ask(fleet.request())
    assert [bool(r.finish_reason) for r in answer.rounds] == [False] * (len(answer.rounds) - 1) + [True]
    assert answer.last.finish_reason == sequence.FINISH_REASON_LENGTH
    m = answer.metrics
    assert m.num_steps == len(answer.rounds)
    assert m.num_draft_tokens == sum(r.num_drafted for r in answer.rounds)
    assert m.num_verified_tokens == sum(r.num_verified for r in answer.rounds)
    assert m.num_accepted_draft_tokens == sum(r.num_accepted for r in answer.rounds)
    assert m.num_spec_steps == sum(r.num_drafted > 0 for r in answer.rounds) == sum(m.acceptance_histogram)
    assert sum(i * n for i, n in enumerate(m.acceptance_histogram)) == m.num_accepted_draft_tokens
    assert m.round_us == sum(r.timing.round_us for r in answer.rounds) > 0
    assert m.verify_us == sum(r.timing.verify_us for r in answer.rounds) > 0
    assert any(r.timing.draft_us for r in answer.rounds if r.num_drafted)


async def test_counters_equal_the_sums_over_requests(fleet: Fleet) -> None:
    await fleet.target()
    await fleet.draft()
    await fleet.start()
    answers = await asyncio.gather(*(fleet.ask(fleet.request([i, 2])) for i in range(1, 6)))
    for phase, field in {"verify": "num_steps", "queue": "num_steps", "draft": "num_spec_steps"}.items():
        counted = fleet.counter("outrider_round_duration_seconds_count", phase=phase)
        assert counted == sum(getattr(a.metrics, field) for a in answers) > 0
    verified_s = fleet.counter("outrider_round_duration_seconds_sum", phase="verify")
    assert verified_s == pytest.approx(sum(a.metrics.verify_us for a in answers) / 1e6)


async def test_a_stop_token_ends_the_answer_inside_an_accepted_block(fleet: Fleet) -> None:
    target = await fleet.target()
    await fleet.draft(FakeDraft(accuracy=1.0))
    await fleet.start()
    truth = continuation([9, 9], 30, target.info.vocab_size)
    stop = truth[17]
    stopping = sequence.Stopping(max_new_tokens=30, stop_token_ids=[stop])
    answer = await fleet.ask(fleet.request([9, 9], stopping=stopping))
    assert answer.token_ids == truth[: truth.index(stop) + 1]
    assert answer.last.finish_reason == sequence.FINISH_REASON_STOP


async def test_a_resumed_request_continues_after_the_tokens_already_delivered(fleet: Fleet) -> None:
    target = await fleet.target()
    await fleet.draft()
    await fleet.start()
    truth = continuation([5, 6, 7], 40, target.info.vocab_size)
    answer = await fleet.ask(fleet.request(resume_token_ids=truth[:15]))
    assert answer.token_ids == truth[15:]


async def test_a_request_resumed_at_its_end_needs_no_worker(fleet: Fleet) -> None:
    target = await fleet.target()
    await fleet.start()
    answer = await fleet.ask(fleet.request(max_new_tokens=3, resume_token_ids=[1, 2, 3]))
    assert answer.token_ids == []
    assert answer.last.finish_reason == sequence.FINISH_REASON_LENGTH
    assert not target.opens


async def test_every_kind_of_sampling_opens_in_its_mode(fleet: Fleet) -> None:
    target, _ = await fleet.target(), await fleet.draft()
    await fleet.start()
    hot = sequence.Sampling(temperature=0.8, top_p=0.95, seed=7)
    await fleet.ask(fleet.request())
    await fleet.ask(fleet.request(sampling=hot, seeded=True))
    by_ratio = fleet.request([5, 6], 200, sampling=sequence.Sampling(temperature=0.8, top_p=0.95))
    by_ratio.speculation = router.SPECULATION_MODE_ON
    answer = await fleet.ask(by_ratio)
    assert [o.mode for o in target.opens] == [
        sequence.VERIFICATION_MODE_GREEDY,
        sequence.VERIFICATION_MODE_COUPLED,
        sequence.VERIFICATION_MODE_RATIO,
    ]
    assert target.opens[1].sampling == hot
    assert target.opens[2].sampling.seed != 0
    assert answer.metrics.num_accepted_draft_tokens > 0


async def test_a_draft_of_another_tokenizer_is_not_paired_and_the_log_says_what_differs(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.target()
    draft = await fleet.draft(FakeDraft(tokenizer_fingerprint="0" * 16, vocab_size=999))
    await fleet.start()
    answer = await fleet.ask(fleet.request())
    assert answer.metrics.num_draft_tokens == 0
    assert not draft.opens
    said = next(r.getMessage() for r in caplog.records if "cannot serve" in r.getMessage())
    assert "tokenizer_fingerprint" in said and "vocab_size is 1000" in said and "999" in said
    assert "protocol_version" not in said


async def test_a_worker_of_another_protocol_version_is_refused_with_a_reason(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.target(FakeTarget(protocol_version=9))
    await fleet.start(failover=FailoverConfig(wait_for_target_s=0.2))
    error = await refusal_of(fleet, fleet.request())
    assert error.code is Code.UNAVAILABLE
    assert any("protocol_version" in r.getMessage() for r in caplog.records)


_BEFORE, _AFTER = {"protocol_version": 1}, {"protocol_version": 2, "min_protocol_version": 1}


@pytest.mark.parametrize("of_target", [_BEFORE, _AFTER], ids=["target before", "target after"])
@pytest.mark.parametrize("of_draft", [_BEFORE, _AFTER], ids=["draft before", "draft after"])
async def test_workers_of_neighbouring_releases_serve_though_they_say_what_is_not_known_here(
    fleet: Fleet, of_target: dict[str, Any], of_draft: dict[str, Any]
) -> None:
    target, draft = FakeTarget(**of_target), FakeDraft(**of_draft)
    # A field of the release after.
    target.info.MergeFromString(b"\xc2\x3e\x01x")
    draft.info.MergeFromString(b"\xc2\x3e\x01x")
    await fleet.target(target)
    await fleet.draft(draft)
    await fleet.start()
    answer = await fleet.ask_until_drafted(fleet.request())
    assert answer.token_ids


async def test_a_cached_prefix_decides_between_equal_targets(fleet: Fleet) -> None:
    from outrider.prefix import block_hashes
    from outrider.rpc.v1 import worker_pb2
    from outrider_controller.router.request.checks import cache_salt

    targets = [await fleet.target() for _ in range(3)]
    await fleet.start()
    prompt = list(range(1, 65))
    hashes = block_hashes(prompt, 16, cache_salt(b"test", "t"))
    for holder in targets:
        prefix = [holder.info.worker_id, hashes]
        await fleet.store.publish_prefix(worker_pb2.WORKER_ROLE_TARGET, prefix[0], prefix[1])
        for _ in range(3):
            await fleet.ask(fleet.request(prompt, max_new_tokens=2))
        assert len(holder.opens) == 3
        await fleet.store.publish_prefix(worker_pb2.WORKER_ROLE_TARGET, prefix[0], [], prefix[1])


async def test_load_decides_between_targets_without_the_prefix(fleet: Fleet) -> None:
    busy, idle = FakeTarget(), FakeTarget()
    busy.load.num_running = 50
    await fleet.target(busy)
    await fleet.target(idle)
    await fleet.start()
    for i in range(4):
        await fleet.ask(fleet.request([i + 1], max_new_tokens=2))
    assert (len(busy.opens), len(idle.opens)) == (0, 4)


async def test_models_are_listed_with_the_workers_that_can_serve_them_and_the_context_of_the_smallest_target(
    fleet: Fleet,
) -> None:
    await fleet.target()
    await fleet.target(FakeTarget(max_context_len=320))
    await fleet.draft()
    await fleet.draft(FakeDraft(tokenizer_fingerprint="0" * 16))
    await fleet.start()
    [model] = (await fleet.stub.ListModels(router.ListModelsRequest())).models
    assert (model.model, model.vocab_size, model.num_targets, model.num_drafts) == ("simulated", 1000, 2, 1)
    assert model.max_context_len == 320


async def test_a_hundred_concurrent_sessions_complete_and_nothing_is_left_open(fleet: Fleet) -> None:
    target, draft = await fleet.target(FakeTarget(step_s=0.005)), await fleet.draft()
    running = await fleet.start()
    rng = random.Random(1)
    asked = [([i + 1, 3], rng.randint(1, 60)) for i in range(100)]
    await fleet.ask(fleet.request())
    tasks_before = len(asyncio.all_tasks())
    answers = await asyncio.gather(*(fleet.ask(fleet.request(prompt, n)) for prompt, n in asked))
    for (prompt, n), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == continuation(prompt, n, 1000)
    await until(lambda: not target.live and not draft.live)
    assert not running.dispatcher.table.requests
    await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
    # One message carries what many sequences have to say.
    assert target.num_messages < sum(len(a.rounds) for a in answers) / 3
    assert draft.behind.total() == 0


async def test_cancelling_closes_the_sequence_on_every_worker_at_once(fleet: Fleet) -> None:
    target, draft = await fleet.target(FakeTarget(step_s=0.01)), await fleet.draft()
    running = await fleet.start()
    for _ in range(5):
        call = fleet.call(fleet.request(max_new_tokens=4000))
        await call.read()
        call.cancel()
        cancelled_s = time.monotonic()
        await until(lambda: not target.live and not draft.live)
        # Not after the 40 s that the answer would take.
        assert time.monotonic() - cancelled_s < 20
    assert {c.reason for c in target.closes} == {c.reason for c in draft.closes} == {sequence.CLOSE_REASON_CANCELLED}
    await until(lambda: not running.dispatcher.table.requests)


async def test_a_deadline_ends_the_call_in_time_and_closes_the_sequence(fleet: Fleet) -> None:
    target, draft = await fleet.target(FakeTarget(step_s=0.01)), await fleet.draft()
    await fleet.start()
    await fleet.ask(fleet.request(max_new_tokens=1))
    for budget_s in (0.02, 0.1, 0.2):
        started_s = time.monotonic()
        error = await refusal_of(fleet, fleet.request(max_new_tokens=4000), timeout=budget_s)
        assert error.code is Code.DEADLINE_EXCEEDED
        # Not after the 40 s that the answer would take.
        assert time.monotonic() - started_s < budget_s + 20
        await until(lambda: not target.live and not draft.live)


async def test_an_unknown_model_is_not_found(fleet: Fleet) -> None:
    await fleet.target()
    await fleet.start()
    error = await refusal_of(fleet, fleet.request(model="other"))
    assert (error.code, error.field) == (Code.NOT_FOUND, "model")


async def test_without_any_target_yet_no_model_is_unknown(fleet: Fleet) -> None:
    await fleet.start()
    error = await refusal_of(fleet, fleet.request(model="other"))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "NO_MODEL")


async def test_a_request_waits_for_a_place_at_a_full_target(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(max_sequences=2, step_s=0.02))
    await fleet.start(admission=AdmissionConfig(queue_timeout_s=30))
    calls = [fleet.call(fleet.request([i + 1], max_new_tokens=4000)) for i in range(2)]
    for call in calls:
        await call.read()
    waiting = asyncio.create_task(fleet.ask(fleet.request(tenant="patient", max_new_tokens=2)))
    waits = {"tenant": "patient", "model_name": "simulated"}
    await until(lambda: fleet.counter("outrider_admission_queue_length", **waits) == 1)
    calls.pop().cancel()
    assert len((await waiting).token_ids) == 2
    assert fleet.counter("outrider_admission_queue_length", **waits) == 0
    assert fleet.counter("outrider_admission_queue_seconds_count", tenant="patient") == 1
    calls.pop().cancel()


async def test_a_request_that_waits_in_vain_is_refused_before_its_deadline(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(max_sequences=1, step_s=0.02))
    router = await fleet.start(admission=AdmissionConfig(queue_timeout_s=30))
    running = fleet.call(fleet.request(max_new_tokens=4000))
    await running.read()
    error = await refusal_of(fleet, fleet.request(), timeout=2)
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
    assert error.retry_after_s and len(target.opens) == 1
    leaving = fleet.call(fleet.request())
    reading = asyncio.create_task(leaving.read())
    await until(lambda: router.dispatcher.admission.num_waiting == 1)
    leaving.cancel()
    await until(lambda: router.dispatcher.admission.num_waiting == 0)
    with pytest.raises((OutriderError, asyncio.CancelledError)):
        await reading
    running.cancel()
    await until(lambda: router.dispatcher.admission.num_running == 0)


async def test_a_full_target_turns_requests_away_before_the_first_token(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(max_sequences=2, step_s=0.02))
    await fleet.start()
    calls = [fleet.call(fleet.request([i + 1], max_new_tokens=4000)) for i in range(2)]
    for call in calls:
        await call.read()
    error = await refusal_of(fleet, fleet.request())
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert error.retry_after_s == 1.0
    assert len(target.opens) == 2
    for call in calls:
        call.cancel()


async def test_a_place_that_became_free_is_free_before_the_target_reports_it(fleet: Fleet) -> None:
    target = await fleet.target(FakeTarget(max_sequences=2, step_s=0.02))
    router = await fleet.start(admission=AdmissionConfig(max_queued=0))
    calls = [fleet.call(fleet.request([i + 1], max_new_tokens=4000)) for i in range(2)]
    for call in calls:
        await call.read()
    target.load.num_running = 2
    link = router.dispatcher.fleet.targets[target.info.worker_id]
    await until(lambda: router.dispatcher.fleet.loads.of(link).num_running == 2)
    for call in calls:
        call.cancel()
    await until(lambda: not link.open_sequences)
    assert router.dispatcher.fleet.loads.of(link).num_running == 2
    assert len((await fleet.ask(fleet.request(max_new_tokens=3))).token_ids) == 3


async def test_a_target_that_was_full_when_the_store_went_away_is_not_taken_to_be_full_for_ever(tmp_path: Path) -> None:
    target = FakeTarget(max_sequences=2)
    target.load.num_running = 2
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedServer.start(tmp_path))
        fleet = Fleet(await stack.enter_async_context(MetadataStore.connect(redis.url)), stack)
        await fleet.target(target)
        await fleet.start()
        assert (await refusal_of(fleet, fleet.request())).code is Code.RESOURCE_EXHAUSTED
        redis.stop()
        target.load.num_running = 0
        async with asyncio.timeout(60):
            while not target.opens:
                with suppress(OutriderError):
                    await fleet.ask(fleet.request())
                await asyncio.sleep(0.1)


async def test_a_target_that_refuses_for_want_of_room_is_asked_again_while_the_request_may_wait(fleet: Fleet) -> None:
    target = FakeTarget()
    target.refuse_opens = Code.RESOURCE_EXHAUSTED
    await fleet.target(target)
    await fleet.start()
    error = await refusal_of(fleet, fleet.request())
    assert error.code is Code.RESOURCE_EXHAUSTED and error.retry_after_s
    # Each time that the leases are read, every 50 ms of half a second.
    assert 1 < len(target.opens) <= 12


async def test_a_router_at_its_limit_turns_requests_away(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(step_s=0.02))
    await fleet.start(admission=AdmissionConfig(max_sessions=1, max_queued=0, retry_after_s=2.5))
    call = fleet.call(fleet.request(max_new_tokens=4000))
    await call.read()
    error = await refusal_of(fleet, fleet.request())
    assert (error.code, error.retry_after_s) == (Code.RESOURCE_EXHAUSTED, 2.5)
    call.cancel()


async def test_a_tenant_that_has_filled_a_router_alone_keeps_no_other_out(fleet: Fleet) -> None:
    await fleet.target(FakeTarget(max_sequences=2, step_s=0.02))
    router = await fleet.start(admission=AdmissionConfig(max_sessions=2, max_queued=1, queue_timeout_s=30))
    greedy = [fleet.call(fleet.request([i + 1], 4000, tenant="greedy")) for i in range(2)]
    for call in greedy:
        await call.read()
    newest = asyncio.create_task(refusal_of(fleet, fleet.request(tenant="greedy")))
    await until(lambda: router.dispatcher.admission.num_waiting == 1)
    quiet = asyncio.create_task(fleet.ask(fleet.request(tenant="quiet", max_new_tokens=2)))
    # The newest of whom most wait makes room in the queue.
    assert (await newest).code is Code.RESOURCE_EXHAUSTED
    greedy.pop().cancel()
    assert len((await quiet).token_ids) == 2
    greedy.pop().cancel()


async def test_a_targets_word_on_a_bad_request_reaches_the_client_with_the_field(fleet: Fleet) -> None:
    target = FakeTarget()
    target.refuse_opens = Code.INVALID_ARGUMENT
    await fleet.target(target)
    await fleet.start()
    error = await refusal_of(fleet, fleet.request())
    assert (error.code, error.field) == (Code.INVALID_ARGUMENT, "x")
    assert len(target.opens) == 1


BAD_REQUESTS = [
    ("model", {"model": ""}),
    ("request_id", {"request_id": "a b\n"}),
    ("tenant", {"tenant": "x" * 129}),
    ("prompt_token_ids", {"prompt_token_ids": []}),
    ("prompt_token_ids[1]", {"prompt_token_ids": [1, 1000]}),
    ("prompt_token_ids", {"prompt_token_ids": [1] * 4096}),
    ("resume_token_ids[0]", {"resume_token_ids": [4000]}),
    ("resume_token_ids", {"resume_token_ids": [1] * 41}),
    ("sampling.temperature", {"sampling": sequence.Sampling(temperature=-1, top_p=1)}),
    ("sampling.temperature", {"sampling": sequence.Sampling(temperature=float("nan"), top_p=1)}),
    ("sampling.top_p", {"sampling": sequence.Sampling(temperature=1)}),
    ("sampling.top_p", {"sampling": sequence.Sampling(temperature=1, top_p=float("nan"))}),
    ("sampling.min_p", {"sampling": sequence.Sampling(temperature=1, top_p=1, min_p=2)}),
    ("stopping.max_new_tokens", {"stopping": sequence.Stopping()}),
    ("stopping.stop_token_ids", {"stopping": sequence.Stopping(max_new_tokens=1, stop_token_ids=[1] * 257)}),
    ("stopping.stop_token_ids[0]", {"stopping": sequence.Stopping(max_new_tokens=1, stop_token_ids=[1000])}),
    ("speculation", {"speculation": 77}),
    ("max_draft_tokens", {"max_draft_tokens": 65}),
    ("samples", {"samples": 9}),
]


async def test_every_bad_field_is_named_and_nothing_reaches_a_worker(fleet: Fleet) -> None:
    target, draft = await fleet.target(), await fleet.draft()
    await fleet.start()
    for field, change in BAD_REQUESTS:
        error = await refusal_of(fleet, fleet.request(**change))
        assert (error.code, error.field) == (Code.INVALID_ARGUMENT, field)
    assert not target.opens and not draft.opens


async def test_all_stop_ids_that_a_client_may_give_fit_beside_the_models_own(fleet: Fleet) -> None:
    await fleet.target()
    await fleet.start()
    stops = [*range(900, 900 + MAX_CLIENT_STOP_TOKENS), 999]
    answer = await fleet.ask(fleet.request(stopping=sequence.Stopping(max_new_tokens=3, stop_token_ids=stops)))
    assert answer.rounds


async def test_at_most_the_requested_number_of_tokens_is_drafted(fleet: Fleet) -> None:
    await fleet.target()
    await fleet.draft(FakeDraft(accuracy=1.0))
    await fleet.start()
    for limit in (1, 3):
        answer = await fleet.ask(fleet.request(max_draft_tokens=limit, speculation=router.SPECULATION_MODE_ON))
        assert max(r.num_drafted for r in answer.rounds) == limit
    answer = await fleet.ask(fleet.request(max_draft_tokens=0))
    assert answer.metrics.num_draft_tokens == 0


async def test_the_simulated_text_depends_on_the_whole_prefix_length() -> None:
    assert next_token([1, 2, 3], 1000) != next_token([9, 1, 2, 3], 1000)
