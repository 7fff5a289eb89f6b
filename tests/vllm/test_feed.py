"""The feed between requests of vLLM and the sources of drafts. Needs vLLM's types, and no engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from outrider.drafting.source import make_sources
from outrider.options.sampling import SamplingParams as OwnParams
from outrider.options.sampling import VerificationMode
from outrider.rpc.v1 import sequence_pb2
from outrider.sequence.key import Finish, SequenceKey
from outrider.sequence.spec import SequenceSpec
from outrider.sequence.speculation import Speculation
from outrider.target.drafts.choice import StepRoom
from outrider.target.drafts.drafts import Drafts
from outrider.target.requests.events import Adjusted, Event, Offered
from outrider.target.requests.report import TargetReport, TargetStats
from outrider.target.requests.row import StepRow
from outrider.tree import DraftTree
from outrider.vllm import plugin
from outrider.vllm.drafts import ChainRow, DraftBook
from outrider.vllm.front import WORKER
from outrider.vllm.scheduler import METHOD, StepFacts
from outrider.vllm.server.feed import Feed, client_id, spec_of
from outrider.vllm.server.plugin_config import PluginConfig
from outrider.worker.events import Opened
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.request import Request, RequestStatus

from tests.vllm.vllm_serve import ODD_JSON

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
COUPLED = sequence_pb2.VERIFICATION_MODE_COUPLED
ROOM = StepRoom(tokens=100, blocks=100, block_size=16)


def request(
    name: str = "one", prompt: list[int] = PROMPT, xargs: dict[str, Any] | None = None, **params: Any
) -> Request:
    sampling = SamplingParams(max_tokens=20, extra_args=xargs, **({"temperature": 0} | params))
    return Request(name, list(prompt), sampling, None)


class Pool:
    """In the place of the thread, with what it is told."""

    def __init__(self) -> None:
        self.arrived: list[Event] = []
        self.opened: list[tuple[SequenceKey, SequenceSpec, sequence_pb2.OpenSequence | None]] = []
        self.commits: list[StepRow[Any]] = []
        self.closed: list[SequenceKey] = []

    def tell(self, action: Callable[[Any], None]) -> None:
        action(self)

    def poll(self) -> list[Event]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def open(self, opened: Opened, announced: sequence_pb2.OpenSequence | None) -> None:
        self.opened.append((opened.key, opened.spec, announced))

    def step(self, report: TargetReport) -> None:
        self.commits.extend(report.commits)

    def close(self, key: SequenceKey, reason: object) -> None:
        self.closed.append(key)


def made(pool: Pool | None = None, **config: Any) -> tuple[Feed, DraftBook]:
    book = DraftBook(lambda cost: 0.0)
    config = {
        "lookups": ["ngram"],
        "tenants": {"off": {"max_draft_tokens": 0}, "two": {"max_draft_tokens": 2}},
    } | config
    lookups = Drafts(make_sources(config["lookups"]), TargetStats(), book.calibration)
    return Feed(book, PluginConfig.of({"outrider": config}), 8, pool, lookups), book


def chosen(feed: Feed, book: DraftBook, one: Request) -> list[int]:
    feed.before_step()
    return [token for choice in placed(book, one) for token in choice.token_ids[: choice.count]]


def placed(book: DraftBook, one: Request) -> list[ChainRow]:
    return book.choose([ChainRow(one.request_id, one.num_tokens, 8)], ROOM)


def commit(feed: Feed, book: DraftBook, one: Request, tokens: list[int], drafted: list[int]) -> None:
    chain = next(iter(placed(book, one)), None)
    one.append_output_token_ids(tokens)
    book.committed(one.request_id, tokens, chain, len(drafted), finished=False)
    feed.follow()


def test_a_lookup_is_offered_before_each_step_and_follows_commits() -> None:
    feed, book = made()
    one = request()
    feed.open(one)
    assert chosen(feed, book, one) == [7, 8, 5, 6]
    commit(feed, book, one, [7, 8, 9], [7, 8, 5, 6])
    assert chosen(feed, book, one) == []
    commit(feed, book, one, [5, 6, 7], [])
    assert chosen(feed, book, one)[:1] == [8]
    one.status = RequestStatus.FINISHED_ABORTED
    feed.follow()
    assert len(feed) == len(book) == 0


@pytest.mark.parametrize(
    ("xargs", "count"),
    [
        ({}, 4),
        ({"outrider_tenant": "two"}, 2),
        ({"outrider_tenant": "off"}, 0),
        ({"max_draft_tokens": 1}, 1),
        ({"max_draft_tokens": 99}, 4),
        ({"max_draft_tokens": 0}, 0),
        ({"max_draft_tokens": -1}, 0),
        ({"max_draft_tokens": "none", "outrider_tenant": 7}, 4),
    ],
)
def test_the_lowest_cap_holds(xargs: dict[str, Any], count: int) -> None:
    feed, book = made()
    one = request(xargs=xargs)
    feed.open(one)
    assert len(chosen(feed, book, one)) == count
    assert (one.request_id in book) == (count > 0)


def test_a_request_that_is_more_than_its_tokens_is_decoded_plainly() -> None:
    feed, book = made()
    streamed = request()
    streamed.resumable = True
    picture = request("two")
    picture.mm_features = [object()]
    for one in (streamed, picture):
        feed.open(one)
    assert len(book) == len(feed) == 0


def test_requests_that_the_scheduler_has_given_up_are_closed() -> None:
    feed, book = made()
    one = request()
    feed.open(one)
    book.forget_all()
    feed.follow()
    feed.before_step()
    assert len(feed) == 0


def test_a_router_is_told_of_every_request_and_decides() -> None:
    pool = Pool()
    feed, book = made(pool, routers=["127.0.0.1:1"], lookups=[])
    one, off = request("cmpl-x1-0-0a1b2c3d", seed=7, temperature=0.5), request("off", xargs={"outrider_tenant": "off"})
    feed.open(one)
    feed.open(off)
    (key, _, announced), (_, _, plain) = pool.opened
    assert announced is not None and plain is not None
    assert (announced.request_id, announced.tenant, announced.mode) == ("x1", "default", COUPLED)
    assert list(announced.prompt_token_ids) == PROMPT and announced.sequence_id == key.sequence_id
    assert (announced.speculation.max_draft_tokens, plain.speculation.max_draft_tokens) == (4, 0)
    draft = Offered(key, DraftTree(len(PROMPT), (7, 8, 9)))
    # Plain until the router has spoken; then as it says, from the next step on.
    for setting, count in ((None, 0), (4, 3), (2, 2), (0, 0)):
        pool.arrived = [draft] if setting is None else [Adjusted(key, Speculation(setting)), draft]
        assert len(chosen(feed, book, one)) == count


def test_a_router_is_told_what_a_step_committed_and_what_it_cost() -> None:
    pool = Pool()
    feed, _ = made(pool, routers=["127.0.0.1:1"], lookups=[])
    one = request()
    feed.open(one)
    feed.follow(StepFacts({"one": 5}, {}, 0.25))
    one.append_output_token_ids([7, 8])
    verified = ChainRow(tree=DraftTree(len(PROMPT), (7, 9, 9)), num_drafted=3, num_verified=2, num_accepted=1)
    feed.follow(StepFacts({"one": 4}, {"one": [7, 9, 9]}, 0.5), {"one": verified}, {"one": 6})
    one.append_output_token_ids([5])
    one.status = RequestStatus.FINISHED_STOPPED
    feed.follow(StepFacts({"one": 1}, {}, 0.125), {"one": ChainRow()})
    first, last = pool.commits
    assert (first.base_len, first.token_ids, first.num_accepted) == (len(PROMPT), [7, 8], 1)
    assert (first.num_cached_tokens, first.rejected, first.finish) == (6, [9, 9], Finish.NONE)
    assert first.times.share_s == pytest.approx(0.75) and first.times.prefill_s == pytest.approx(0.25)
    assert (last.base_len, last.finish) == (len(PROMPT) + 2, Finish.STOP)
    assert last.times.share_s == pytest.approx(0.125)
    assert not pool.closed and not len(feed)


def test_a_request_that_ends_without_tokens_is_closed() -> None:
    pool = Pool()
    feed, _ = made(pool, routers=["127.0.0.1:1"], lookups=[])
    one = request()
    feed.open(one)
    one.status = RequestStatus.FINISHED_ABORTED
    feed.follow()
    assert pool.closed == [pool.opened[0][0]] and not pool.commits


@pytest.mark.parametrize(
    ("request_id", "known"),
    [
        ("chatcmpl-a-b-0a1b2c3d", "a-b"),
        ("cmpl-a-b-0-0a1b2c3d", "a-b"),
        ("3_cmpl-a-12-0a1b2c3d", "a"),
        ("resp_a-0a1b2c3d", "resp_a"),
        ("own", "own"),
    ],
)
def test_a_request_is_known_by_the_id_of_its_answer(request_id: str, known: str) -> None:
    assert client_id(request_id) == known


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"seed": 7, "temperature": 0.5, "top_p": 0.9}])
def test_a_draft_is_asked_for_the_likeliest_tokens(params: dict[str, Any]) -> None:
    opening = spec_of(request(**params), Speculation(4), "")
    assert (opening.mode, opening.params) == (VerificationMode.GREEDY, OwnParams(temperature=0.0))


def test_tenants_do_not_share_what_is_learnt() -> None:
    salts = {spec_of(request(), Speculation(4), tenant).salt for tenant in ("", "one", "two")}
    assert len(salts) == 3


ODD: list[Any] = [
    *ODD_JSON,
    *((), (1,), set(), {1}, b"", b"\xff", object(), plugin, print, 1j, range(3)),
    *({}, {"committed": "x"}, {"committed": -1}, {"committed": [1]}, {"bias": 3}, {"bias": {"x": "y"}}, {1: 2}),
]
"""What JSON can hold, and what only another transport can."""


@pytest.mark.parametrize("name", ["outrider", "outrider_tenant", "max_draft_tokens", "own"])
@pytest.mark.parametrize("number", range(len(ODD)))
def test_nothing_that_a_client_can_send_fails_in_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    monkeypatch.setattr(plugin.BaseScheduler, "add_request", lambda self, request: None)
    scheduler = object.__new__(plugin.Scheduler)
    scheduler.feed, scheduler.book = made()
    book = scheduler.book
    other, one = request("other"), request(xargs={name: ODD[number]})
    scheduler.add_request(other)
    scheduler.add_request(one)
    assert other.request_id in book, "the drafts of others go on"
    scheduler.feed.before_step()


@pytest.mark.parametrize("salt", ["\ud800", "x", "é", ""])
def test_any_salt_has_a_salt_of_its_own_tenant(salt: str) -> None:
    one = request()
    one.cache_salt = salt
    assert len({spec_of(one, Speculation(4), tenant).salt for tenant in ("", "one")}) == 2


def test_another_release_is_refused_before_its_parts_are_looked_for() -> None:
    named = "lambda name: '0.34.0+cpu' if name.startswith('vllm') else known(name)"
    program = f"import importlib.metadata as m; known = m.version; m.version = {named}; import outrider.vllm.worker"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "UnsupportedVersion: vllm: 0.34.0+cpu is installed; supported are 0.32, 0.33" in ended.stderr


@pytest.mark.parametrize(
    ("config", "worker", "method", "problem"),
    [
        ({"draft": []}, WORKER, METHOD, r"additional_config\.outrider\.draft: there is no such option"),
        ({"samples": "/x"}, WORKER, METHOD, r"additional_config\.outrider\.samples: there is no such option"),
        ({}, "auto", METHOD, "worker_cls: "),
        ({}, WORKER, None, r"speculative_config\.method: "),
    ],
)
def test_a_server_that_cannot_draft_does_not_start(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], worker: str, method: str | None, problem: str
) -> None:
    def begin(self: Any, vllm_config: Any) -> None:
        self.vllm_config, self.max_num_running_reqs = vllm_config, 4
        self.dynamic_sd_lookup, self.num_spec_tokens = None, 4

    monkeypatch.setattr(vllm_scheduler.Scheduler, "__init__", begin)
    given = SimpleNamespace(
        additional_config={"outrider": config},
        parallel_config=SimpleNamespace(worker_cls=worker),
        speculative_config=method and SimpleNamespace(method=method),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        model_config=SimpleNamespace(get_vocab_size=lambda: 100),
    )
    with pytest.raises(ValueError, match=problem):
        plugin.Scheduler(given)
