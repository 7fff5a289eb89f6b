"""The console: a page of the control plane's ops port that shows the fleet, tenants, requests and events. Reads only.

No build step and no files from other hosts. Its data are answers of the operators' API, which runs on the event loop;
the ops port's threads wait for them.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from outrider.errors import NotFound, OutriderError, PermissionDenied, Unauthenticated, Unavailable
from outrider.metadata import MetadataStore
from outrider.rpc.access.roles import CALLS, Guard, bearer_token
from outrider.rpc.v1 import control_pb2 as control
from outrider.rpc.v1 import trace_pb2
from outrider.telemetry.ops import AUTHORIZATION, Page, PageMaker
from outrider.token_bytes import TokenBytes

from outrider_controller.control.api.decisions import decision_row, server_caps, speed_of, under_servers
from outrider_controller.control.api.rows import worker_rows
from outrider_controller.control.console.vocabulary import ConsoleVocabulary

_TIMEOUT_S = 3.0
_NUM_EVENTS = 50
_NUM_SEQUENCES = 100
_NUM_TENANTS = 200
_AS_OPEN_AS = "/outrider.rpc.v1.ControlService/GetTrace"
_HOW = "open /console#token=TOKEN with an operator's token, or an API key with the scope admin"
_STATIC = {
    "/console": ("console.html", "text/html; charset=utf-8"),
    "/console.js": ("console.js", "text/javascript; charset=utf-8"),
    "/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console.svg": ("console.svg", "image/svg+xml"),
}
Answer = Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]]


class Console:
    """Must be made on the event loop that runs `api`."""

    def __init__(self, api: Any, events: MetadataStore, texts: ConsoleVocabulary, guard: Guard) -> None:
        """`api`: the calls of ControlService, by their names; `guard`: that of its server."""
        self._api = api
        self._events = events
        self._texts = texts
        self._guard = guard
        self._loop = asyncio.get_running_loop()

    def pages(self) -> dict[str, PageMaker]:
        static = {path: _static(name, content_type) for path, (name, content_type) in _STATIC.items()}
        return {**static, "/console/data": self._asking(self._data), "/console/trace": self._asking(self._trace)}

    def _asking(self, answer: Answer) -> PageMaker:
        async def admitted(query: Mapping[str, str]) -> dict[str, Any]:
            await self._guard.admit(CALLS[_AS_OPEN_AS], bearer_token(query.get(AUTHORIZATION)))
            return await answer(query)

        def make(query: Mapping[str, str]) -> Page:
            asked = asyncio.run_coroutine_threadsafe(asyncio.wait_for(admitted(query), _TIMEOUT_S), self._loop)
            try:
                # A blocked event loop does not apply its own timeout.
                return _json(HTTPStatus.OK, asked.result(2 * _TIMEOUT_S))
            except NotFound as error:
                return _json(HTTPStatus.NOT_FOUND, {"error": str(error)})
            except (Unauthenticated, PermissionDenied) as error:
                return _json(HTTPStatus.UNAUTHORIZED, {"error": f"{error}; {_HOW}"})
            except OutriderError as error:
                return _json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            except TimeoutError:
                return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": f"no answer within {_TIMEOUT_S:g} s"})

        return make

    async def _data(self, query: Mapping[str, str]) -> dict[str, Any]:
        workers, sequences, activities, events = await asyncio.gather(
            self._api.ListWorkers(control.ListWorkersRequest(), None),
            self._api.ListSequences(control.ListSequencesRequest(limit=_NUM_SEQUENCES), None),
            self._api.ListActivities(control.ListActivitiesRequest(), None),
            self._events.last_events(_NUM_EVENTS),
        )
        tenants = [activity.tenant for activity in activities.activities if activity.tenant]
        return {
            "now_ms": time.time_ns() // 1_000_000,
            "metadata_available": workers.metadata_available,
            "unreachable_routers": list(activities.unreachable_routers),
            "workers": worker_rows(workers.workers),
            "sequences": [_plain(one) for one in sequences.sequences],
            "num_sequences": sequences.num_sequences,
            "activities": [_plain(one) for one in activities.activities],
            "rollouts": await self._rollouts(),
            "decisions": {
                tenant: await self._decisions(tenant, server_caps(workers.workers, tenant))
                for tenant in tenants[:_NUM_TENANTS]
            },
            "events": [{"unix_ms": event.unix_ms, "kind": event.kind, "fields": event.fields} for event in events],
        }

    async def _decisions(self, tenant: str, caps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """None where another control plane leads."""
        try:
            explained = await self._api.Explain(control.ExplainRequest(tenant=tenant), None)
        except Unavailable:
            return []
        rows = (under_servers(decision_row(one), caps) for one in explained.decisions)
        return [row | {"speed": speed_of(row)} for row in rows]

    async def _rollouts(self) -> list[dict[str, Any]]:
        """None while the metadata store is away."""
        try:
            found = await self._api.ListDrafts(control.ListDraftsRequest(), None)
        except Unavailable:
            return []
        return [_plain(one.rollout) for one in found.drafts if one.HasField("rollout")]

    async def _trace(self, query: Mapping[str, str]) -> dict[str, Any]:
        request = control.ControlServiceGetTraceRequest(request_id=query.get("request_id", ""))
        answer = await self._api.GetTrace(request, None)
        return {"traces": [await self._with_texts(trace) for trace in answer.traces]}

    async def _with_texts(self, trace: trace_pb2.RequestTrace) -> dict[str, Any]:
        """Each round with the texts of its tokens, where they were kept and their vocabulary is to be had."""
        shown = _plain(trace)
        if not any(one.token_ids for one in trace.rounds):
            return shown
        try:
            table = await self._texts.of(trace.model)
        except TimeoutError:
            return shown | {"texts_to_come": True}
        if table is not None:
            decoder = _decoder()
            for one, row in zip(trace.rounds, shown["rounds"], strict=True):
                row["texts"] = _texts(table, one.token_ids, decoder)
                # With a decoder of their own: what was rejected is not part of the text.
                row["rejected_texts"] = _texts(table, one.rejected_token_ids, _decoder())
        return shown


def _decoder() -> codecs.IncrementalDecoder:
    """A character may be spread over several tokens."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _texts(table: TokenBytes, token_ids: Iterable[int], decoder: codecs.IncrementalDecoder) -> list[str]:
    return [decoder.decode(table.of(token_id)) for token_id in token_ids]


def _static(name: str, content_type: str) -> PageMaker:
    page = Page(HTTPStatus.OK, content_type, (files(__package__) / "static" / name).read_bytes())
    return lambda query: page


def _json(status: HTTPStatus, body: Mapping[str, Any]) -> Page:
    return Page(status, "application/json", json.dumps(body).encode())


def _plain(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)
