"""Requests under way, without workers: what tests of the router's parts start from."""

from __future__ import annotations

from typing import Any

from outrider.options.sampling import SamplingParams, VerificationMode
from outrider.rpc.v1 import router_pb2 as router
from outrider_controller.router.config import FailoverConfig, PolicyConfig, TraceConfig
from outrider_controller.router.observe.tracing import Recorder, Traces
from outrider_controller.router.request.checks import Request
from outrider_controller.router.request.failover import FailoverState
from outrider_controller.router.request.state import RequestState
from outrider_controller.router.requests.sequences import ActiveRequest, RoundTimer
from outrider_controller.router.speculation.controller import Allowance, SpeculationController


def a_request(**fields: Any) -> Request:
    """Greedy, with a prompt of three tokens and stop token 99; any field can be overridden."""
    defaults: dict[str, Any] = {
        "request_id": "r",
        "tenant": "t",
        "model": "m",
        "prompt": (1, 2, 3),
        "params": SamplingParams(temperature=0, seed=9),
        "mode": VerificationMode.GREEDY,
        "max_new_tokens": 10,
        "stop_token_ids": frozenset({99}),
        "salt": b"salt",
    }
    return Request(**{**defaults, **fields})


def under_way(request: Request, recorder: Recorder | None = None, opened_us: int = 1000) -> ActiveRequest:
    """As it is when a target was chosen, whose vocabulary is of 200 tokens."""
    recorder = recorder or Traces(TraceConfig()).start(request, opened_us)
    state = RequestState(request, 200)
    recorder.placed(state, opened_us)
    return ActiveRequest(
        request=request,
        state=state,
        speculation=SpeculationController(PolicyConfig(), Allowance(5, 50_000)),
        failover=FailoverState(FailoverConfig(), "revision"),
        timer=RoundTimer(opened_us),
        recorder=recorder,
        new_response=router.RouteResponse,
    )
