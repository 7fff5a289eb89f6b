"""From a RouteRequest to a Request: every field in range, or one error that names it. Pure but for drawing a seed."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from outrider.errors import InvalidRequest
from outrider.protocol import convert, logprobs
from outrider.protocol.convert import sampling_from_proto
from outrider.protocol.limits import MAX_DRAFT_TOKENS, MAX_MODEL_CHARS, MAX_REVISION_CHARS, MAX_TENANT_WEIGHT
from outrider.protocol.validate import check_label, check_prediction, check_stopping, check_token_ids, check_weight
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.telemetry.context import NO_CONTEXT, TraceContext
from outrider.tuning import USUAL_TOKENS

_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Request:
    """A checked RouteRequest: every field in range for the model that will serve it."""

    request_id: str
    tenant: str
    model: str
    prompt: tuple[int, ...]
    resume: tuple[int, ...]
    sampling: sequence.Sampling
    stopping: sequence.Stopping
    seeded: bool
    speculation: router.SpeculationMode.ValueType
    max_draft_tokens: int | None
    cache_salt: bytes
    weight: float = 1.0
    """The tenant's weight."""
    expected_tokens: int = USUAL_TOKENS
    """Of the answer, without the prompt."""
    resume_revision: str = ""
    """The model revision that computed `resume`; empty if unknown."""
    trace_context: TraceContext = NO_CONTEXT
    logits: sequence.LogitsOptions | None = None
    logprobs: sequence.LogprobsOptions | None = None
    prediction: tuple[int, ...] = ()
    """Predicted output tokens, for drafts."""
    num_resumed_by_client: int = 0
    """So many of `resume` came with the client's request, and no call has committed them."""
    billed: int | None = None
    """Tokens billed as prompt; None: the prompt's."""
    samples: sequence.SampleConsent.ValueType = sequence.SAMPLE_CONSENT_UNSPECIFIED
    consent_unix_us: int = 0

    @property
    def begins_at(self) -> int:
        """The committed length at which the answer's first token is committed."""
        return len(self.prompt) + self.num_resumed_by_client

    @property
    def billed_prompt_tokens(self) -> int:
        return len(self.prompt) if self.billed is None else self.billed

    @property
    def cost(self) -> int:
        """Expected tokens of prompt and answer."""
        return len(self.prompt) + self.expected_tokens

    @property
    def finish_reason(self) -> sequence.FinishReason.ValueType:
        """The finish reason if the resumed tokens already end the request; else unspecified."""
        if self.resume and self.resume[-1] in self.stopping.stop_token_ids:
            return sequence.FINISH_REASON_STOP
        if len(self.resume) >= self.stopping.max_new_tokens:
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
    check_label("request_id", message.request_id)
    check_label("tenant", message.tenant)
    if len(message.resume_revision) > MAX_REVISION_CHARS:
        raise InvalidRequest("resume_revision", f"must have at most {MAX_REVISION_CHARS} characters")
    if message.samples not in sequence.SampleConsent.values():
        raise InvalidRequest("samples", f"{message.samples} is not a consent")
    sampling_from_proto(message.sampling)
    check_stopping(message.stopping.max_new_tokens, message.stopping.stop_token_ids, info.vocab_size)
    _check_tokens(message, info)
    _check_speculation(message)
    sampling = sequence.Sampling()
    sampling.CopyFrom(message.sampling)
    if not message.seeded:
        # Drawn only here: after a failover the next target must continue with the same noise.
        sampling.seed = message.sampling.seed or secrets.randbits(64)
    return Request(
        request_id=message.request_id,
        tenant=message.tenant,
        model=message.model,
        prompt=tuple(message.prompt_token_ids),
        resume=tuple(message.resume_token_ids),
        sampling=sampling,
        stopping=message.stopping,
        seeded=message.seeded,
        speculation=message.speculation,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        cache_salt=cache_salt(salt_key, message.tenant),
        weight=tenant_weight(message),
        expected_tokens=_expected_tokens(message),
        resume_revision=message.resume_revision,
        trace_context=TraceContext.named(message.traceparent, message.tracestate),
        logits=_logits(message, info.vocab_size),
        logprobs=_logprobs(message),
        prediction=tuple(message.predicted_token_ids),
        num_resumed_by_client=message.num_resumed_by_client,
        billed=message.billed_prompt_tokens if message.HasField("billed_prompt_tokens") else None,
        samples=message.samples,
        consent_unix_us=message.consent_unix_us,
    )


def tenant_weight(message: router.RouteRequest) -> float:
    """Raises InvalidRequest."""
    weight = message.weight or 1.0
    check_weight("weight", weight, MAX_TENANT_WEIGHT)
    return weight


def _expected_tokens(message: router.RouteRequest) -> int:
    return min(message.expected_tokens or USUAL_TOKENS, message.stopping.max_new_tokens)


def _logits(message: router.RouteRequest, vocab_size: int) -> sequence.LogitsOptions | None:
    if not message.HasField("logits"):
        return None
    convert.logits_from_proto(message.logits).check_vocabulary(vocab_size, "logits.")
    return message.logits


def _logprobs(message: router.RouteRequest) -> sequence.LogprobsOptions | None:
    if not message.HasField("logprobs"):
        return None
    logprobs.options_from_proto(message.logprobs, len(message.prompt_token_ids))
    return message.logprobs


def _check_tokens(message: router.RouteRequest, info: worker.WorkerInfo) -> None:
    if not message.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", "must have at least one token")
    check_token_ids("prompt_token_ids", message.prompt_token_ids, info.vocab_size)
    check_token_ids("resume_token_ids", message.resume_token_ids, info.vocab_size)
    check_prediction(message.predicted_token_ids, info.vocab_size, info.max_context_len)
    if len(message.resume_token_ids) > message.stopping.max_new_tokens:
        raise InvalidRequest("resume_token_ids", "more than stopping.max_new_tokens")
    if len(message.prompt_token_ids) >= info.max_context_len:
        prompt_len = len(message.prompt_token_ids)
        raise InvalidRequest(
            "prompt_token_ids", f"{prompt_len} tokens leave no room in a context of {info.max_context_len}"
        )
    if len(message.prompt_token_ids) + len(message.resume_token_ids) > info.max_context_len:
        raise InvalidRequest("resume_token_ids", f"beyond the context of {info.max_context_len}")
    if message.num_resumed_by_client > len(message.resume_token_ids):
        raise InvalidRequest("num_resumed_by_client", "more than resume_token_ids")
    if message.billed_prompt_tokens > len(message.prompt_token_ids) + message.num_resumed_by_client:
        raise InvalidRequest("billed_prompt_tokens", "more than prompt_token_ids and num_resumed_by_client")


def _check_speculation(message: router.RouteRequest) -> None:
    if message.speculation not in router.SpeculationMode.values():
        raise InvalidRequest("speculation", f"{message.speculation} is not a speculation mode")
    if message.max_draft_tokens > MAX_DRAFT_TOKENS:
        raise InvalidRequest("max_draft_tokens", f"must be at most {MAX_DRAFT_TOKENS}")
