"""A RouteRequest, checked: every field in range, or one error that names it. Pure but for drawing a seed."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Sequence

from outrider.errors import InvalidRequest
from outrider.protocol import logits_options
from outrider.protocol.limits import MAX_DRAFT_TOKENS
from outrider.rpc.v1 import router_pb2 as router
from outrider.rpc.v1 import sequence_pb2 as sequence
from outrider.rpc.v1 import worker_pb2 as worker
from outrider.telemetry.context import TraceContext

from outrider_controller.router.config import AdmissionConfig
from outrider_controller.router.session import Request

_LABEL = re.compile(r"[!-~]{0,128}")
_MAX_REVISION_CHARS = 256
_MAX_MODEL_CHARS = 256
_SALT_BYTES = 16


def cache_salt(key: bytes, tenant: str) -> bytes:
    """The tenant's own salt: prefixes of different tenants never meet in a cache."""
    return hmac.new(key, tenant.encode(), hashlib.sha256).digest()[:_SALT_BYTES]


def check_model_name(message: router.RouteRequest) -> str:
    """Raises InvalidRequest."""
    if not 0 < len(message.model) <= _MAX_MODEL_CHARS:
        raise InvalidRequest("model", f"must have 1 to {_MAX_MODEL_CHARS} characters")
    return message.model


def check_request(
    message: router.RouteRequest, info: worker.WorkerInfo, admission: AdmissionConfig, salt_key: bytes
) -> Request:
    """The request as the router works with it. `info` is of the model that will serve it. Raises InvalidRequest."""
    _check_label("request_id", message.request_id)
    _check_label("tenant", message.tenant)
    if len(message.resume_revision) > _MAX_REVISION_CHARS:
        raise InvalidRequest("resume_revision", f"must have at most {_MAX_REVISION_CHARS} characters")
    _check_sampling(message.sampling)
    _check_stopping(message.stopping, admission, info.vocab_size)
    _check_tokens(message, info)
    _check_speculation(message)
    sampling = sequence.Sampling()
    sampling.CopyFrom(message.sampling)
    if not message.seeded:
        # Drawn once, here: a failover has to continue the same noise.
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
        resume_revision=message.resume_revision,
        trace_context=TraceContext.named(message.traceparent, message.tracestate),
        logits=_logits(message, info.vocab_size),
    )


def _logits(message: router.RouteRequest, vocab_size: int) -> sequence.LogitsOptions | None:
    if not message.HasField("logits"):
        return None
    logits_options.from_proto(message.logits).check_vocabulary(vocab_size, "logits.")
    return message.logits


def _check_label(field: str, value: str) -> None:
    if not _LABEL.fullmatch(value):
        raise InvalidRequest(field, "must be at most 128 printable ASCII characters without spaces")


def _check_sampling(sampling: sequence.Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest("sampling.temperature", "must be a finite number, at least 0")
    # Written so that NaN fails too.
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("sampling.top_p", "must be above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest("sampling.min_p", "must be in 0 to 1")


def _check_stopping(stopping: sequence.Stopping, admission: AdmissionConfig, vocab_size: int) -> None:
    if stopping.max_new_tokens < 1:
        raise InvalidRequest("stopping.max_new_tokens", "must be at least 1")
    if len(stopping.stop_token_ids) > admission.max_stop_token_ids:
        raise InvalidRequest("stopping.stop_token_ids", f"must be at most {admission.max_stop_token_ids}")
    _check_vocabulary("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)


def _check_tokens(message: router.RouteRequest, info: worker.WorkerInfo) -> None:
    if not message.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", "must have at least one token")
    _check_vocabulary("prompt_token_ids", message.prompt_token_ids, info.vocab_size)
    _check_vocabulary("resume_token_ids", message.resume_token_ids, info.vocab_size)
    if len(message.resume_token_ids) > message.stopping.max_new_tokens:
        raise InvalidRequest("resume_token_ids", "more than stopping.max_new_tokens")
    if len(message.prompt_token_ids) >= info.max_context_len:
        prompt_len = len(message.prompt_token_ids)
        raise InvalidRequest(
            "prompt_token_ids", f"{prompt_len} tokens leave no room in a context of {info.max_context_len}"
        )
    if len(message.prompt_token_ids) + len(message.resume_token_ids) > info.max_context_len:
        raise InvalidRequest("resume_token_ids", f"beyond the context of {info.max_context_len}")


def _check_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        index = next(i for i, token in enumerate(token_ids) if token >= vocab_size)
        raise InvalidRequest(f"{field}[{index}]", f"outside the vocabulary of {vocab_size}")


def _check_speculation(message: router.RouteRequest) -> None:
    if message.speculation not in router.SpeculationMode.values():
        raise InvalidRequest("speculation", f"{message.speculation} is not a speculation mode")
    if message.max_draft_tokens > MAX_DRAFT_TOKENS:
        raise InvalidRequest("max_draft_tokens", f"must be at most {MAX_DRAFT_TOKENS}")
