"""Messages of any shape: every one is followed, refused by name, or ignored; the worker and its neighbours go on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from outrider.errors import InvalidRequest, OutriderError
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.rpc.v1 import target_pb2
from outrider.sequence.key import Finish
from outrider.target.requests.limits import Limits
from outrider.target.requests.report import TargetReport
from outrider.target.requests.row import StepRow
from outrider.target.requests.times import Times
from outrider.target.requests.wire import events_of, response_of
from outrider.tree import DraftTree
from outrider.worker.events import Failed, Opened, Refused

from tests.unit.target.harness import Bench, key, opening

NUMBERS = [0, 1, 2, 3, 5, 17, 383, 384, 2**31, 2**32 - 1]
FLOATS = [0.0, 0.8, 1.0, -1.0, float("nan"), float("inf"), 1e30]


def anything(rng: random.Random) -> target_pb2.VerifyRequest:
    """A well-formed message full of nonsense about sequences 2 to 5."""

    def n() -> int:
        return rng.choice(NUMBERS)

    def ids() -> list[int]:
        return [
            rng.choice([1, 5, 200, 383, 384, 2**32 - 1] if rng.random() < 0.1 else [1, 5, 200])
            for _ in range(rng.randint(0, 8))
        ]

    def sampling() -> sp.Sampling:
        f = rng.choice
        if rng.random() < 0.5:
            return rng.choice([sp.Sampling(top_p=1), sp.Sampling(temperature=0.8, top_p=1, seed=3)])
        return sp.Sampling(temperature=f(FLOATS), top_k=n(), top_p=f(FLOATS), min_p=f(FLOATS), seed=n())

    def speculation() -> sp.Speculation:
        return sp.Speculation(max_draft_tokens=rng.choice([0, 4, n()]), max_wait_us=rng.choice([0, n()]))

    def q() -> sp.DraftDistribution:
        return sp.DraftDistribution(token_ids=ids(), counts=rng.choice([[65536], [n()], ids()]))

    def sequence_id() -> int:
        return rng.randint(2, 5)

    request = target_pb2.VerifyRequest()
    for _ in range(rng.randint(0, 2)):
        stopping = sp.Stopping(max_new_tokens=rng.choice([8, n()]), stop_token_ids=ids())
        request.opens.add(
            sequence_id=sequence_id(), prompt_token_ids=ids(), committed_token_ids=rng.choice([[], ids()]),
            sampling=sampling(), stopping=stopping, mode=rng.randint(0, 4),  # type: ignore[arg-type]
            speculation=speculation(), cache_salt=rng.randbytes(rng.choice([0, 8, 65])),
        )  # fmt: skip
    for _ in range(rng.randint(0, 1)):
        request.settings.add(sequence_id=sequence_id(), speculation=speculation())
    for _ in range(rng.randint(0, 1)):
        request.closes.add(sequence_id=sequence_id(), reason=rng.randint(0, 9))  # type: ignore[arg-type]
    return request


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_nonsense_ends_what_it_names_and_nothing_else(tiny: Path, seed: int) -> None:
    sound = opening([5, 6, 7], max_new_tokens=150)
    alone = Bench(tiny)
    alone.open(1, sound)
    alone.run()
    bench = Bench(tiny)
    bench.open(1, sound)
    rng = random.Random(seed)
    for _ in range(300):
        request = target_pb2.VerifyRequest.FromString(anything(rng).SerializeToString())
        for opened in request.opens:
            bench.tokens[key(opened.sequence_id)] = [*opened.prompt_token_ids, *opened.committed_token_ids]
        for event in events_of(request, 1, bench.limits, bench.now_s):
            bench.worker.apply(event)
        bench.worker.step()
        report = bench.worker.take_report()
        response_of(report)
        for commit in report.commits:
            bench.tokens[commit.key].extend(commit.token_ids)
        for failed in report.failures:
            assert isinstance(failed.error, OutriderError)
        bench.now_s += 0.01
    bench.end_stream()
    assert bench.tokens[key(1)] == alone.tokens[key(1)]
    assert bench.worker.stats.num_step_failures == 0
    assert bench.worker.stats.num_committed_tokens > 150, "some of the nonsense made sense"
    assert bench.engine.kv.num_free_blocks == bench.limits.num_blocks


def test_a_report_becomes_one_message_for_each_stream_it_concerns() -> None:
    times = Times(queue_s=0.00025, wait_s=0.0001, prefill_s=0.002)
    draft = DraftTree(10, (7, 9, 3), chances=(1.0, 0.8, 0.2), serial=12)
    about = {"sequence": None, "key": key(5, stream=1), "base_len": 10}
    committed: StepRow[None] = StepRow(**about, times=times, draft=draft, token_ids=[7, 8], accepted=[0])  # type: ignore[arg-type]
    committed.num_verified, committed.finish = 2, Finish.STOP
    committed.num_dropped, committed.num_prompt_tokens, committed.num_cached_tokens = 4, 6, 3
    failed = Failed(key(6, stream=2), InvalidRequest("mode", "no"))
    responses = response_of(
        TargetReport(commits=[committed], failures=[failed], step_us=900, batch_sequences=2, batch_tokens=9)
    )
    commit = sp.Commit(
        sequence_id=5, base_len=10, token_ids=[7, 8], num_drafted=3, num_verified=2, num_accepted=1,
        finish_reason=sp.FINISH_REASON_STOP, num_dropped=4, queue_us=250, num_cached_tokens=3,
        wait_us=100, prefill_us=2000, rejected_token_ids=[9, 3], chances=bytes([255, 204, 51]),
    )  # fmt: skip
    error = sp.SequenceError(sequence_id=6, code=3, reason="INVALID_FIELD", field="mode", message="no")
    step = {"step_us": 900, "batch_sequences": 2, "batch_tokens": 9}
    assert responses == {
        1: target_pb2.VerifyResponse(commits=[commit], **step),  # type: ignore[arg-type]
        2: target_pb2.VerifyResponse(errors=[error], **step),  # type: ignore[arg-type]
    }


def test_what_an_unforeseen_error_says_stays_inside() -> None:
    report = TargetReport(failures=[Failed(key(6), RuntimeError("the prompt was: secret"))])
    (error,) = response_of(report)[1].errors
    assert (error.code, error.reason) == (13, "INTERNAL")
    assert "secret" not in error.message


def test_what_a_sequence_took_goes_with_its_commit_or_by_itself_once_it_has_ended() -> None:
    times = Times(share_s=0.004, drafted_s=0.002, wasted_s=0.0015)
    draft = DraftTree(10, (9, 20, 21), parents=(-1, -1, -1), serial=1)
    about = {"sequence": None, "key": key(5, stream=1), "base_len": 10}
    committed: StepRow[None] = StepRow(**about, times=times, draft=draft, token_ids=[7], finish=Finish.STOP)  # type: ignore[arg-type]
    removed = [(key(5, stream=1), Times()), (key(6, stream=2), Times(share_s=0.0007))]
    responses = response_of(TargetReport(commits=[committed], removed=removed))
    [commit] = responses[1].commits
    assert (commit.share_us, commit.drafted_us, commit.wasted_us, commit.num_branch_tokens) == (4000, 2000, 1500, 2)
    assert not responses[1].usage
    assert list(responses[2].usage) == [sp.SequenceUsage(sequence_id=6, share_us=700)]


@pytest.mark.parametrize("field", ["request_id", "tenant"])
@pytest.mark.parametrize("value", ["two words", "a\nline", "x" * 129, "\u202e"])
def test_what_would_garble_a_log_is_no_name(field: str, value: str) -> None:
    one = sp.OpenSequence(
        sequence_id=1,
        prompt_token_ids=[5],
        sampling=sp.Sampling(top_p=1),
        stopping=sp.Stopping(max_new_tokens=4),
        mode=sp.VERIFICATION_MODE_GREEDY,
        request_id="r1",
        tenant="acme",
    )
    limits = Limits(vocab_size=384, max_context_len=64, block_size=8, num_blocks=8)
    [good] = events_of(target_pb2.VerifyRequest(opens=[one]), 1, limits, 0.0)
    assert isinstance(good, Opened)
    assert good.spec.log_fields == {"request_id": "r1", "tenant": "acme"}
    setattr(one, field, value)
    [bad] = events_of(target_pb2.VerifyRequest(opens=[one]), 1, limits, 0.0)
    assert isinstance(bad, Refused)
    assert isinstance(bad.error, InvalidRequest) and bad.error.field == field
