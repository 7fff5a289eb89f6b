"""TraceService: what this router knows of a request's rounds."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from outrider.errors import InvalidRequest, UnknownRequest
from outrider.rpc.v1 import trace_pb2 as trace
from outrider.rpc.v1 import trace_pb2_grpc

from outrider_controller.router.traces import Traces

SERVICE = "outrider.rpc.v1.TraceService"


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Reads; changes nothing."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces

    async def GetTrace(
        self, request: trace.GetTraceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trace.GetTraceResponse:
        if not request.request_id:
            raise InvalidRequest("request_id", "is missing")
        # The clock by which the rounds are recorded.
        now_us = int(asyncio.get_running_loop().time() * 1e6)
        found = self._traces.find(request.request_id, now_us)
        if not found:
            raise UnknownRequest(
                f"no trace of {request.request_id[:128]!r} on this router: it carried no such request, or has "
                f"forgotten it (it remembers {len(self._traces)} requests that have ended)"
            )
        return trace.GetTraceResponse(traces=found)
