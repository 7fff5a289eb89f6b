"""Clients, which use the shipped gateway's request path."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

from outrider.errors import OutriderError
from outrider.gateway.config import Failover
from outrider.gateway.generation.generation import Generator
from outrider.gateway.generation.metrics import GatewayMetrics
from outrider.gateway.generation.requests import Generation, Options, TokenPrompt
from outrider.gateway.tenants.admission import Admission
from outrider.gateway.tokenizer.catalog import Catalog, Model
from outrider.gateway.tokenizer.model import ModelTokenizer
from outrider.token_bytes import TokenBytes
from prometheus_client import CollectorRegistry

from tests.simulation.hash_model import VOCAB_SIZE
from tests.simulation.processes import MODEL
from tests.simulation.schedule import RequestPlan
from tests.simulation.world import World

FAILOVER = Failover(window_s=8.0)
_METRICS = GatewayMetrics(CollectorRegistry())
_BYTES = TokenBytes(tuple(bytes([64 + token % 64]) for token in range(VOCAB_SIZE)))


@dataclass(slots=True)
class Answer:
    """What one client received."""

    plan: RequestPlan
    started_s: float = 0.0
    ended_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    error: OutriderError | None = None
    cancelled: bool = False

    @property
    def end(self) -> str:
        """The end of the answer, in a word or two."""
        if self.error is not None:
            return self.error.reason or self.error.code.name
        return "cancelled" if self.cancelled else self.finish or "nothing"


class _OneModel:
    """The gateway's catalog after it has found the model."""

    def __init__(self, max_context_len: int) -> None:
        tokenizer = ModelTokenizer.__new__(ModelTokenizer)
        for name, value in {"token_bytes": _BYTES, "eos_token_ids": (), "sampling_defaults": {}}.items():
            object.__setattr__(tokenizer, name, value)
        self._model = Model(MODEL, max_context_len, VOCAB_SIZE, tokenizer)

    async def get(self, name: str) -> Model:
        return self._model


class Clients:
    """All clients of a run behind one gateway."""

    def __init__(self, world: World) -> None:
        self.admission = Admission(1000)
        self._world = world
        context = min(plan.max_context_len for plan in world.schedule.targets)
        self._generator = Generator(
            cast(Catalog, _OneModel(context)),
            world.routers_known,
            self.admission,
            _METRICS,
            FAILOVER,
            request_timeout_s=600.0,
            clock=asyncio.get_running_loop().time,
        )

    async def ask(self, plan: RequestPlan) -> Answer:
        """Runs one request to its end, of any kind."""
        await asyncio.sleep(plan.at_s)
        answer = Answer(plan, started_s=self._world.now_s)
        self._world.log(f"client {plan.number} asks: {plan}")
        asking = asyncio.create_task(self._ask(answer))
        hangs_up_s = plan.cancel_after_s
        await asyncio.wait([asking], timeout=hangs_up_s)
        if not asking.done():
            asking.cancel()
            answer.cancelled = True
            await asyncio.gather(asking, return_exceptions=True)
        asking.result() if not asking.cancelled() else None
        answer.ended_s = self._world.now_s
        self._world.log(f"client {plan.number} ends: {answer.end} after {len(answer.token_ids)} tokens")
        return answer

    async def _ask(self, answer: Answer) -> None:
        plan = answer.plan
        try:
            async with self._generator.start(
                [[_generation(plan)]], default_max_tokens=None, timeout_s=plan.timeout_s
            ) as [answering]:
                async for chunk in answering.chunks:
                    answer.token_ids += chunk.token_ids
                    answer.finish = chunk.finish.reason if chunk.finish else None
                    if _enough(answer):
                        answer.cancelled = True
                        return
        except OutriderError as error:
            answer.error = error


def _enough(answer: Answer) -> bool:
    after = answer.plan.cancel_after_tokens
    return answer.finish is None and after is not None and len(answer.token_ids) >= after


def _generation(plan: RequestPlan) -> Generation:
    options: dict[str, Any] = {
        name: getattr(plan, name)
        for name in ("temperature", "top_k", "seed", "max_tokens", "stop_token_ids", "speculation", "max_draft_tokens")
    }
    return Generation(MODEL, TokenPrompt(plan.prompt), Options(**options))
