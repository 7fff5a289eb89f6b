"""From a RouteRequest to a Request: every field in range, or one error that names it. Pure but for drawing a seed."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, replace
from typing import ClassVar

from outrider.errors import InvalidRequest
from outrider.limits import MAX_DRAFT_TOKENS, MAX_MODEL_CHARS, MAX_REVISION_CHARS, MAX_TENANT_WEIGHT, check_weight
from outrider.options.sampling import VerificationMode
from outrider.protocol.sequences import spec_from_proto
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.sequence.spec import SequenceSpec
from outrider.telemetry.context import NO_CONTEXT, TraceContext
from outrider.tuning import USUAL_TOKENS

_SALT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(SequenceSpec):
    """A checked sequence, and what only its router needs to know of it."""

    committed_field: ClassVar[str] = "resume_token_ids"
    model: str
    choice: router.SpeculationMode.ValueType = router.SPECULATION_MODE_AUTO
    """The client's."""
    max_draft_tokens: int | None = None
    weight: float = 1.0
    """The tenant's weight."""
    expected_tokens: int = USUAL_TOKENS
    """Of the answer, without the prompt."""
    resume_revision: str = ""
    """The model revision that computed `committed`; empty if unknown."""
    trace_context: TraceContext = NO_CONTEXT
    num_resumed_by_client: int = 0
    """So many of `committed` came with the client's request, and no call has committed them."""
    billed: int | None = None
    """Tokens billed as prompt; None: the prompt's."""

    @property
    def begins_at(self) -> int:
        """The committed length at which the answer's first token is committed."""
        return len(self.prompt) + self.num_resumed_by_client

    @property
    def begun(self) -> bool:
        """Another call has committed tokens of the answer: it is not turned away any more."""
        return len(self.committed) > self.num_resumed_by_client

    @property
    def billed_prompt_tokens(self) -> int:
        return len(self.prompt) if self.billed is None else self.billed

    @property
    def cost(self) -> int:
        """Expected tokens of prompt and answer. What a client resumes with is run like a prompt."""
        return self.begins_at + self.expected_tokens

    @property
    def finish_reason(self) -> sequence.FinishReason.ValueType:
        """The finish reason if the committed tokens already end the request; else unspecified."""
        if self.committed and self.committed[-1] in self.stop_token_ids:
            return sequence.FINISH_REASON_STOP
        if len(self.committed) >= self.max_new_tokens:
            return sequence.FINISH_REASON_LENGTH
        return sequence.FINISH_REASON_UNSPECIFIED


def cache_salt(key: bytes, tenant: str) -> bytes:
    """The tenant's own salt: different tenants never share a cached prefix."""
    return hmac.new(key, tenant.encode(), hashlib.sha256).digest()[:_SALT_BYTES]


def check_model_name(message: router.RouteRequest) -> str:
    """Raises InvalidRequest."""
    if not 0 < len(message.model) <= MAX_MODEL_CHARS:
        raise InvalidRequest("model", f"must have 1 to {MAX_MODEL_CHARS} characters")
    return message.model


def check_request(message: router.RouteRequest, info: worker.WorkerInfo, salt_key: bytes) -> Request:
    """The request as the router works with it. `info` is of the model that will serve it. Raises InvalidRequest."""
    if len(message.resume_revision) > MAX_REVISION_CHARS:
        raise InvalidRequest("resume_revision", f"must have at most {MAX_REVISION_CHARS} characters")
    _check_speculation(message)
    request = spec_from_proto(
        Request,
        message,
        committed=tuple(message.resume_token_ids),
        mode=verification_mode(temperature=message.sampling.temperature, seeded=message.seeded),
        salt=cache_salt(salt_key, message.tenant),
        model=message.model,
        choice=message.speculation,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        weight=tenant_weight(message),
        expected_tokens=min(message.expected_tokens or USUAL_TOKENS, message.stopping.max_new_tokens),
        resume_revision=message.resume_revision,
        trace_context=TraceContext.named(message.traceparent, message.tracestate),
        num_resumed_by_client=message.num_resumed_by_client,
        billed=message.billed_prompt_tokens if message.HasField("billed_prompt_tokens") else None,
    )
    # One that has tokens may have all of them.
    request.check(info.vocab_size, info.max_context_len, room=not request.committed)
    if request.num_resumed_by_client > len(request.committed):
        raise InvalidRequest("num_resumed_by_client", "more than resume_token_ids")
    if request.billed_prompt_tokens > request.begins_at:
        raise InvalidRequest("billed_prompt_tokens", "more than prompt_token_ids and num_resumed_by_client")
    if message.seeded or message.sampling.seed:
        return request
    # Drawn only here: after a failover the next target must continue with the same noise.
    return replace(request, params=replace(request.params, seed=secrets.randbits(64)))


def verification_mode(*, temperature: float, seeded: bool) -> VerificationMode:
    """The verification mode of a new request. It stays the same over every failover.

    Ratio accepts most but needs q. A draft that joins later can always give one: a proposal without probabilities is a
    point mass.
    """
    if temperature == 0:
        return VerificationMode.GREEDY
    return VerificationMode.COUPLED if seeded else VerificationMode.RATIO


def tenant_weight(message: router.RouteRequest) -> float:
    """Raises InvalidRequest."""
    weight = message.weight or 1.0
    check_weight("weight", weight, MAX_TENANT_WEIGHT)
    return weight


def _check_speculation(message: router.RouteRequest) -> None:
    if message.speculation not in router.SpeculationMode.values():
        raise InvalidRequest("speculation", f"{message.speculation} is not a speculation mode")
    if message.max_draft_tokens > MAX_DRAFT_TOKENS:
        raise InvalidRequest("max_draft_tokens", f"must be at most {MAX_DRAFT_TOKENS}")
