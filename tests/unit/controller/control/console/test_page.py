"""The console's pages over a real ops port, with a control plane that answers from a script; and in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from outrider.errors import NotFound, Unavailable
from outrider.metadata import Event
from outrider.rpc.access.roles import ClusterSecret, Guard, Role, RoleGuard
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import drafts_pb2, policy_pb2, sequence_pb2, trace_pb2, worker_pb2
from outrider.rpc.v1.control_pb2_grpc import ControlServiceServicer
from outrider.telemetry.ops import Ops, Page, PageMaker, serving_ops
from outrider.token_bytes import TokenBytes
from outrider_controller.control.api.rows import worker_rows
from outrider_controller.control.console.page import Console

WORKERS = [
    control.WorkerStatus(
        info=worker_pb2.WorkerInfo(role=worker_pb2.WORKER_ROLE_TARGET, worker_id="target-1", model="large"),
        load=worker_pb2.WorkerLoad(num_running=3, num_free_blocks=70),
        address="127.0.0.1:7001",
    ),
    control.WorkerStatus(
        info=worker_pb2.WorkerInfo(role=worker_pb2.WORKER_ROLE_DRAFT, worker_id="draft-1", model="small"),
        cordon=control.Cordon(worker_id="draft-1", reason="<b>new disk</b>"),
    ),
]
_OPEN = RoleGuard()
HOSTILE = "<img src=x onerror=console.error(1)>"


class ScriptedControl(ControlServiceServicer):
    leads = True

    async def ListWorkers(self, request: Any, context: Any) -> control.ListWorkersResponse:
        return control.ListWorkersResponse(workers=WORKERS, metadata_available=True)

    async def ListSequences(self, request: Any, context: Any) -> control.ListSequencesResponse:
        one = trace_pb2.RunningSequence(request_id="r-1", tenant=HOSTILE, target_id="target-1", output_tokens=12)
        return control.ListSequencesResponse(sequences=[one], num_sequences=1)

    async def ListActivities(self, request: Any, context: Any) -> control.ListActivitiesResponse:
        activity = trace_pb2.Activity(
            tenant="shop", output_tokens=900, num_verified_tokens=50, num_accepted_draft_tokens=40
        )
        return control.ListActivitiesResponse(activities=[activity])

    async def Explain(self, request: control.ExplainRequest, context: Any) -> control.ExplainResponse:
        if not self.leads:
            raise Unavailable("another one leads", reason="NOT_LEADER")
        decision = policy_pb2.TenantDecision(
            tenant=request.tenant, target="large", mode=policy_pb2.PLAN_MODE_ON, reason="saves", saving=0.5, price=0.25
        )
        decision.lower, decision.upper, decision.rounds = 0.4, 0.6, 900
        few = policy_pb2.TenantDecision(
            tenant=request.tenant, target="small", mode=policy_pb2.PLAN_MODE_TRY, reason="unknown", saving=1.9, rounds=1
        )
        return control.ExplainResponse(decisions=[decision, few], known=True)

    async def ListDrafts(self, request: Any, context: Any) -> control.ListDraftsResponse:
        if not self.leads:
            raise Unavailable("the metadata store does not answer")
        evidence = drafts_pb2.RolloutEvidence(saving=0.03, lower=-0.01, upper=0.07)
        rollout = drafts_pb2.Rollout(draft="new@1/model", state=drafts_pb2.ROLLOUT_STATE_RUNNING, evidence=evidence)
        return control.ListDraftsResponse(drafts=[drafts_pb2.DraftVersion(version="new@1/model", rollout=rollout)])

    async def GetTrace(
        self, request: control.ControlServiceGetTraceRequest, context: Any
    ) -> control.ControlServiceGetTraceResponse:
        if request.request_id != "r-1":
            raise NotFound(f"no request {request.request_id!r}", reason="UNKNOWN_REQUEST", field="request_id")
        done = trace_pb2.RoundTrace(
            token_ids=[11, 12, 13],
            rejected_token_ids=[14],
            num_tokens=3,
            num_drafted=3,
            num_verified=3,
            num_accepted=2,
            sources=[sequence_pb2.SourceTokens(source="model"), sequence_pb2.SourceTokens(source="ngram", own=True)],
            token_sources=[0, 1, 0],
        )
        trace = trace_pb2.RequestTrace(request_id="r-1", tenant="shop", rounds=[done])
        return control.ControlServiceGetTraceResponse(traces=[trace])


class FinishingControl(ScriptedControl):
    """Its request is not in the list, is there from the second question on, and ends with the fourth."""

    asked = 0

    async def GetTrace(
        self, request: control.ControlServiceGetTraceRequest, context: Any
    ) -> control.ControlServiceGetTraceResponse:
        self.asked += 1
        if self.asked == 1:
            raise NotFound("no such request", reason="UNKNOWN_REQUEST", field="request_id")
        rounds = [trace_pb2.RoundTrace(token_ids=[20 + n], num_tokens=1) for n in range(min(self.asked, 4))]
        trace = trace_pb2.RequestTrace(request_id="r-9", router_id="router-1", rounds=rounds, running=self.asked < 4)
        return control.ControlServiceGetTraceResponse(traces=[trace])


class ScriptedTexts:
    """The first half of a character, its second half, markup, and a word."""

    table: TokenBytes | None = TokenBytes((*(b"",) * 11, "é".encode()[:1], "é".encode()[1:], b"<img>", b" no"))
    late = False

    async def of(self, model: str) -> TokenBytes | None:
        if self.late:
            raise TimeoutError
        return self.table


class ScriptedEvents:
    async def last_events(self, limit: int) -> list[Event]:
        return [Event("1700000000000-0", "worker_joined", {"worker_id": "target-1", "note": HOSTILE})]


# A window of Chromium is never narrower than 500 pixels, so it is the page that is made 390 wide.
NARROW = b"html { width: 390px; }"
MEASURE = b"""setTimeout(() => {
  const all = [...document.querySelectorAll("body *")];
  document.title = `${Math.max(...all.map((one) => one.getBoundingClientRect().right))}`;
}, 3000);"""


@asynccontextmanager
async def console(
    api: ControlServiceServicer, texts: ScriptedTexts | None = None, guard: Guard = _OPEN
) -> AsyncIterator[str]:
    ops = Ops("control", None)
    ops.pages.update(Console(api, ScriptedEvents(), texts or ScriptedTexts(), guard).pages())
    added = b"<link rel=stylesheet href=narrow.css><script src=measure.js></script></head>"
    ops.pages["/narrow"] = _page("text/html", ops.pages["/console"]({}).body.replace(b"</head>", added))
    ops.pages["/narrow.css"], ops.pages["/measure.js"] = _page("text/css", NARROW), _page("text/javascript", MEASURE)
    async with serving_ops(ops, "127.0.0.1:0") as address:
        yield f"http://{address}"


def _page(content_type: str, body: bytes) -> PageMaker:
    return lambda query: Page(HTTPStatus.OK, content_type, body)


async def get(url: str, token: str = "") -> tuple[int, dict[str, Any]]:
    def ask() -> tuple[int, dict[str, Any]]:
        try:
            with urlopen(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=10) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)

    return await asyncio.to_thread(ask)


async def test_the_console_shows_the_rows_that_outrider_get_prints() -> None:
    async with console(ScriptedControl()) as url:
        status, data = await get(f"{url}/console/data")
    assert status == 200 and data["workers"] == worker_rows(WORKERS)
    assert data["decisions"]["shop"][0]["mode"] == "on"
    assert data["rollouts"][0]["evidence"]["lower"] == -0.01
    assert [sequence["request_id"] for sequence in data["sequences"]] == ["r-1"]
    assert data["events"][0]["kind"] == "worker_joined"


async def test_whoever_has_no_token_of_an_operator_is_shown_nothing_of_anybody() -> None:
    secret = ClusterSecret(b"0123456789abcdef")
    paths = ("/console/data", "/console/trace?request_id=r-1")
    async with console(ScriptedControl(), guard=RoleGuard(secret)) as url:
        for path in paths:
            for token in ("", "wrong", secret.token(Role.GATEWAY)):
                status, said = await get(url + path, token)
                assert (status, set(said)) == (401, {"error"})
                assert "#token=" in said["error"]
            assert (await get(url + path, secret.token(Role.OPERATOR)))[0] == 200


async def test_where_another_control_plane_leads_the_rest_is_shown() -> None:
    api = ScriptedControl()
    api.leads = False
    async with console(api) as url:
        status, data = await get(f"{url}/console/data")
    assert status == 200 and data["decisions"] == {"shop": []} and len(data["workers"]) == 2


async def test_an_unknown_request_is_said_to_be_unknown() -> None:
    async with console(ScriptedControl()) as url:
        status, answer = await get(f"{url}/console/trace?request_id={quote('a b')}")
    assert (status, answer) == (404, {"error": "request_id: no request 'a b'"})


async def test_tokens_have_their_texts_and_a_character_comes_with_the_last_of_its_tokens() -> None:
    async with console(ScriptedControl()) as url:
        _, answer = await get(f"{url}/console/trace?request_id=r-1")
    ((shown,),) = [trace["rounds"] for trace in answer["traces"]]
    assert (shown["texts"], shown["rejected_texts"]) == (["", "é", "<img>"], [" no"])
    assert shown["token_ids"] == [11, 12, 13]


async def test_a_vocabulary_that_is_still_to_come_is_asked_for_again_and_one_that_is_missing_is_not() -> None:
    texts = ScriptedTexts()
    texts.table = None
    async with console(ScriptedControl(), texts) as url:
        _, answer = await get(f"{url}/console/trace?request_id=r-1")
        texts.late = True
        _, later = await get(f"{url}/console/trace?request_id=r-1")
    (missing,), (late,) = answer["traces"], later["traces"]
    assert "texts_to_come" not in missing and late["texts_to_come"] is True
    assert "texts" not in missing["rounds"][0] and "texts" not in late["rounds"][0]


async def shown_by_chromium(url: str, tmp_path: Path, *options: str) -> tuple[str, str]:
    """The page after four seconds, and what the browser logged."""
    browser = await asyncio.create_subprocess_exec(
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", *options),
        *("--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom", url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    shown, log = await asyncio.wait_for(browser.communicate(), 120)
    return shown.decode(), log.decode()


needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs a browser: apt-get install chromium"
)


@pytest.mark.slow
@needs_chromium
async def test_a_request_is_followed_until_its_trace_says_that_it_has_ended(tmp_path: Path) -> None:
    api = FinishingControl()
    async with console(api) as url:
        page, _ = await shown_by_chromium(f"{url}/console?request_id=r-9", tmp_path)
    assert "Ended on router-1" in page and "token 23" in page
    assert api.asked == 4


@pytest.mark.slow
@needs_chromium
async def test_a_browser_shows_it_without_an_error_and_reads_nothing_as_html(tmp_path: Path) -> None:
    async with console(ScriptedControl()) as url:
        page, log = await shown_by_chromium(f"{url}/console?request_id=r-1", tmp_path)
    assert "CONSOLE" not in log, log
    for text in (
        "2 processes",
        "target-1",
        "cordoned",
        "shop",
        "drafts clearly save time. Speed: 1.33 (1.25 to 1.43) × plain",
        "Speed: not measured yet",
        "0.030 (-0.010 to 0.070)",
        "worker joined",
        "r-1",
        ">é</span>",
    ):
        assert text in page, text
    assert page.count("token accepted") == 1 + 2 and page.count("token rejected") == 1 + 1
    assert page.count("token accepted ngram") == 1 and "token 12, ngram" in page
    assert "<img" not in page and "&lt;img" in page


@pytest.mark.slow
@needs_chromium
async def test_nothing_runs_off_a_screen_of_390_pixels(tmp_path: Path) -> None:
    async with console(ScriptedControl()) as url:
        page, _ = await shown_by_chromium(f"{url}/narrow", tmp_path, "--window-size=500,900")
    found = re.search(r"<title>([\d.]+)</title>", page)
    assert found is not None and float(found[1]) <= 390
