"""A router that an engine with the plugin is attached to stops, dies, is late or sends garbage: no text changes,
nothing fails, and the next one is obeyed. So it is where our own code that speaks with it raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider.rpc.v1 import attach_pb2, attach_pb2_grpc, target_pb2
from outrider.rpc.v1 import sequence_pb2 as sp
from outrider.vllm.server.router_link import RouterLink
from outrider.vllm.server.server_drafts import ServerDrafts

from tests.vllm import step_log
from tests.vllm.second_runner import Plan, answers, engine
from tests.vllm.test_planted_faults import GROUP
from tests.vllm.vllm_serve import scripted, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

Says = Callable[[attach_pb2.AttachRequest], list[target_pb2.VerifyRequest]]
_MOST = 2**32 - 1


def settings(numbers: list[int], **speculation: Any) -> target_pb2.VerifyRequest:
    made = sp.Speculation(**speculation)
    return target_pb2.VerifyRequest(settings=[sp.SetSpeculation(sequence_id=one, speculation=made) for one in numbers])


def opened(request: attach_pb2.AttachRequest) -> list[int]:
    return [one.sequence_id for one in request.opens]


def allowing(request: attach_pb2.AttachRequest) -> list[target_pb2.VerifyRequest]:
    return [settings(opened(request), max_own_draft_tokens=4)]


def late(request: attach_pb2.AttachRequest) -> list[target_pb2.VerifyRequest]:
    """Of what has ended."""
    ended = [one.sequence_id for one in request.step.commits if one.finish_reason]
    return [settings([*ended, *(one.sequence_id for one in request.closes)], max_own_draft_tokens=4)]


def garbage(request: attach_pb2.AttachRequest) -> list[target_pb2.VerifyRequest]:
    numbers = [*opened(request), 1, 2**63]
    drafts = [
        sp.DraftAssignment(worker_id="\n" * 300, address=where, sequence_id=1) for where in ("", "x", "::", "[:0")
    ]
    opens = [sp.OpenSequence(sequence_id=one, prompt_token_ids=[_MOST], tenant="\n") for one in numbers]
    return [
        settings(numbers, max_draft_tokens=_MOST, max_own_draft_tokens=_MOST, max_wait_us=_MOST, weight=float("nan")),
        settings(numbers, max_own_draft_tokens=4, weight=-1e300),
        *(
            target_pb2.VerifyRequest(set_drafts=[target_pb2.SetDraft(sequence_id=one, draft=draft) for one in numbers])
            for draft in drafts
        ),
        target_pb2.VerifyRequest(opens=opens, closes=[sp.CloseSequence(sequence_id=one) for one in numbers]),
    ]


def dying(request: attach_pb2.AttachRequest) -> list[target_pb2.VerifyRequest]:
    if request.step.commits:
        raise RuntimeError("planted")
    return allowing(request)


PLACES = ("ServerDrafts.open", "ServerDrafts.step", "RouterLink.open", "RouterLink.step", "RouterLink._received")
FAULTS: dict[str, Says | None] = {"stops": None, "silent": lambda request: [], "late": late, "garbage": garbage}
FAULTS |= {"dies": dying}


class ScriptedRouter(attach_pb2_grpc.AttachServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self.num_streams = 0
        self._says: Says | None = None
        self._hang_up: Callable[[], object] = lambda: None

    async def Attach(self, requests: Any, context: Any) -> Any:  # type: ignore[override]
        says, over, loop = self._says, asyncio.Event(), asyncio.get_running_loop()
        self._hang_up = lambda: loop.call_soon_threadsafe(over.set)
        self.num_streams += 1
        await context.send_initial_metadata(())
        if says is None:
            await over.wait()
            return
        # The other end says at least each second that it lives.
        async for request in requests:
            if over.is_set():
                return
            for message in says(request):
                yield message

    def begin(self, says: Says | None) -> None:
        """In a stream that begins now. None: reads nothing either."""
        before, self._says = self.num_streams, says
        self._hang_up()
        until(lambda: self.num_streams > before)


@pytest.fixture(scope="module")
def router() -> Iterator[ScriptedRouter]:
    made = ScriptedRouter()
    with scripted(made, attach_pb2_grpc.add_AttachServiceServicer_to_server):
        yield made


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("steps") / "log"
    path.touch()
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv(step_log.PATH, str(path))
        yield path


@pytest.fixture(scope="module")
def llm(tiny_vllm: Path, router: ScriptedRouter, log: Path) -> Iterator[Any]:
    config = {"lookups": ["ngram", "suffix"], "routers": [router.address], "row_price": 0}
    more = {"scheduler_cls": f"{step_log.__name__}.Scheduler", "additional_config": {"outrider": config}}
    with engine(Plan(str(tiny_vllm), asynchronous=True, more=more), drafts=True) as made:
        until(lambda: router.num_streams)
        yield made


def drafted(log: Path) -> int:
    return sum(one.num_drafted for one in step_log.steps(log))


@pytest.fixture
def link(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.feed._pool.drafts.router


def begin(router: ScriptedRouter, link: Any, says: Says | None) -> None:
    router.begin(says)
    # Until then a request goes by what the last router said.
    until(lambda: link.attached)


def obeyed(llm: Any, log: Path, wanted: Any) -> None:
    """Drafts come back, the text is the same, and nothing has failed."""

    def drafts_again() -> bool:
        before = drafted(log)
        assert answers(llm, GROUP) == wanted
        return drafted(log) > before

    until(drafts_again)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler.num_faults and scheduler.feed._pool._thread.is_alive()


@pytest.fixture
def wanted(llm: Any, router: ScriptedRouter, link: Any, log: Path) -> Any:
    """The texts without drafts: a router that says nothing allows none."""
    begin(router, link, FAULTS["silent"])
    before, texts = drafted(log), answers(llm, GROUP)
    assert drafted(log) == before
    llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache()
    return texts


@pytest.mark.parametrize("how", FAULTS)
def test_no_text_changes_and_the_next_router_is_obeyed(
    llm: Any, router: ScriptedRouter, link: Any, log: Path, wanted: Any, how: str
) -> None:
    begin(router, link, FAULTS[how])
    for _ in range(2):
        assert answers(llm, GROUP) == wanted
    begin(router, link, allowing)
    obeyed(llm, log, wanted)


@pytest.mark.parametrize("place", PLACES)
def test_our_code_may_raise_on_the_thread_of_the_network(
    llm: Any, router: ScriptedRouter, link: Any, log: Path, wanted: Any, place: str
) -> None:
    def raising(*args: Any, **kwargs: Any) -> None:
        raised.append(place)
        raise RuntimeError(f"planted in {place}")

    raised: list[str] = []
    owner, _, name = place.partition(".")
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr({"ServerDrafts": ServerDrafts, "RouterLink": RouterLink}[owner], name, raising)
        for _ in range(2):
            router.begin(allowing)
            assert answers(llm, GROUP) == wanted
        assert raised
    begin(router, link, allowing)
    obeyed(llm, log, wanted)
