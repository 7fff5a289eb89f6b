"""What a worker may say of itself, in its lease or at the beginning of a stream. Pure.

Others plan, place and count by these numbers, so each is bounded where it is read: whoever holds a role's password can
write anything into a lease of that role.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.message import Message

from outrider.metadata.keys import ROLES, role_name
from outrider.rpc.v1 import control_pb2, worker_pb2

_ROLE_NAMES = frozenset(map(role_name, ROLES))
MAX_LEASE_BYTES = 64 << 10
MAX_TEXT_CHARS = 256
_MAX_RECIPE_CHARS = 4000
_MAX_CAPS = 1000
"""Tenants that an attached server names."""

_LAST_MS = 253_402_300_799_000
"""The last moment of the year 9999."""
_TOKENS, _SEQUENCES, _BYTES, _NS = 1 << 30, 1 << 20, 1 << 50, 3_600_000_000_000
MOST: Mapping[str, float] = {
    "protocol_version": 10_000,
    "min_protocol_version": 10_000,
    "vocab_size": 1 << 24,
    "max_context_len": _TOKENS,
    "max_draft_tokens": 1 << 16,
    "max_sequences": _SEQUENCES,
    "block_size": 1 << 16,
    "feature_bits": 64,
    "num_blocks": _TOKENS,
    "device_memory_bytes": _BYTES,
    "num_running": _SEQUENCES,
    "num_waiting": _SEQUENCES,
    "num_sequences": _SEQUENCES,
    "num_free_blocks": _TOKENS,
    "prefill_token_ns": _NS,
    "row_ns": _NS,
    "memory_used_bytes": _BYTES,
    "utilization": 1.0,
    "power_watts": 1e6,
    **dict.fromkeys(("since_unix_ms", "hand_over_unix_ms", "drained_unix_ms"), _LAST_MS),
}
"""Greatest value of each number; the least is 0."""


def check_status(status: control_pb2.WorkerStatus) -> None:
    """Raises ValueError for a lease that cannot be a worker's, with the field."""
    problem = next(_odd_fields(status), None) or worker_problem(status.info, status.load)
    if problem is not None:
        raise ValueError(f"lease: {problem}")


def worker_problem(info: worker_pb2.WorkerInfo, load: worker_pb2.WorkerLoad) -> str | None:
    """Why this cannot be what a worker says of itself, with the field; None if it can."""
    for message in (info, load):
        if (problem := next(_odd_fields(message), None)) is not None:
            return problem
    # Loads and cordons are looked up by id alone.
    named = info.worker_id.partition("-")[0]
    if named in _ROLE_NAMES and named != role_name(info.role):
        return f"worker_id: {info.worker_id} is the id of another role"
    if info.min_protocol_version > info.protocol_version:
        return f"min_protocol_version: {info.min_protocol_version} is above protocol_version {info.protocol_version}"
    if 0 < info.num_blocks < load.num_free_blocks:
        return f"num_free_blocks: {load.num_free_blocks} of {info.num_blocks}"
    if info.attached and info.role != worker_pb2.WORKER_ROLE_TARGET:
        return "attached: is for targets"
    caps = info.tenant_draft_tokens
    if len(caps) > _MAX_CAPS or any(
        _odd_text("", name) or most > MOST["max_draft_tokens"] for name, most in caps.items()
    ):
        return f"tenant_draft_tokens: {len(caps)} entries, or one out of bounds"
    return None


def _odd_fields(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        if isinstance(value, str):
            if problem := _odd_text(field.name, value):
                yield problem
        elif isinstance(value, Message):
            yield from _odd_fields(value)
        elif (most := MOST.get(field.name)) is not None and not (math.isfinite(value) and 0 <= value <= most):
            yield f"{field.name}: {value:g} is not from 0 to {most:g}"


def _odd_text(name: str, value: Any) -> str | None:
    most = _MAX_RECIPE_CHARS if name == "recipe" else MAX_TEXT_CHARS
    if len(value) > most:
        return f"{name}: {len(value)} characters; at most {most} are allowed"
    return None if value.isprintable() or name == "recipe" else f"{name}: has characters that cannot be printed"
