"""Workers as flat rows, for `outrider get workers -o json` and the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.protocol.pairs import unpaired
from outrider.rpc.enums import value_name
from outrider.rpc.v1 import control_pb2, worker_pb2


def worker_rows(workers: Sequence[control_pb2.WorkerStatus]) -> list[dict[str, Any]]:
    """Workers as flat rows, by role and id. A draft that none of the targets can use is `unpaired`, with the reason."""
    rows = [worker_row(status) for status in sorted(workers, key=lambda w: (w.info.role, w.info.worker_id))]
    reasons = unpaired(status.info for status in workers if not status.refused)
    for row in rows:
        if row["status"] == "ready" and row["id"] in reasons:
            row |= {"status": "unpaired", "reason": reasons[row["id"]]}
    return rows


def worker_row(status: control_pb2.WorkerStatus) -> dict[str, Any]:
    info, load = status.info, status.load
    return {
        "id": info.worker_id,
        "role": value_name(worker_pb2.WorkerRole.DESCRIPTOR, info.role),
        "status": _status(status),
        "reason": status.refused or status.cordon.reason,
        "model": info.model,
        "engine": info.engine,
        "draft_kind": info.draft_kind,
        "address": status.address,
        "pid": status.pid,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "sequences": load.num_sequences,
        # A worker without a KV cache of its own has none.
        "free_blocks": load.num_free_blocks if info.num_blocks else None,
        "num_blocks": info.num_blocks or None,
        "draining": load.draining,
        "age_ms": status.age_ms,
        "device": info.device,
        "device_name": info.device_name,
        **_gpu_fields(status),
        "dtype": info.dtype,
        "max_context_len": info.max_context_len,
        "max_sequences": info.max_sequences,
        "model_revision": info.model_revision,
        "tokenizer_fingerprint": info.tokenizer_fingerprint,
        "version": info.version,
    }


def _gpu_fields(status: control_pb2.WorkerStatus) -> dict[str, float | None]:
    """None where it is not reported."""
    if not status.load.HasField("gpu"):
        return dict.fromkeys(("gpu_memory_gib", "gpu_used_gib", "gpu_utilization", "gpu_power_watts"))
    gpu, memory_bytes = status.load.gpu, status.info.device_memory_bytes
    return {
        "gpu_memory_gib": round(memory_bytes / 2**30, 1),
        "gpu_used_gib": round(gpu.memory_used_bytes / 2**30, 1),
        "gpu_utilization": round(gpu.utilization, 2),
        "gpu_power_watts": round(gpu.power_watts, 1),
    }


def _status(status: control_pb2.WorkerStatus) -> str:
    """In one word: whether it gets new sequences, and if not, why."""
    cordon = status.cordon
    if status.refused:
        return "refused"
    if status.load.draining:
        return "stopping"
    if cordon.drained_unix_ms:
        return "drained"
    if cordon.hand_over_unix_ms:
        return "draining"
    if status.HasField("cordon"):
        return "cordoned"
    return "attached" if status.info.attached else "ready"
