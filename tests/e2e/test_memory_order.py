"""Whom the kernel ends where memory is short, and that the events tell of whoever died."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from outrider.metadata import MetadataStore
from outrider.metadata.events import EventKind
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.up.command import process_rows
from outrider_controller.cli.up.stack import Stack
from outrider_controller.cli.up.stack_config import StackConfig

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300), pytest.mark.slow]


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_drafts_are_ended_first_then_targets_and_whoever_dies_has_an_event(tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "tiny", max_context_len=512))
    sizes = f"--dtype float32 --kv-cache-bytes {16 << 20}"
    config = StackConfig(
        target_model=model, draft_model=model, target_args=sizes, draft_args=sizes, run_dir=tmp_path / "run"
    )
    async with Stack(config) as stack, MetadataStore.connect(stack.metadata_url, call_timeout_s=2.0) as store:
        pids = {row["process"].strip(): row["pid"] for row in await process_rows(stack)}
        scores = {name: score(pid) for name, pid in pids.items()}
        ours = score(os.getpid())
        assert scores.pop("draft-0") == 1000
        assert scores.pop("target-0") == min(1000, ours + 300)
        assert {"router (Ray actor)", "control (Ray actor)", "gateway", "redis", "controller"} == set(scores)
        assert set(scores.values()) == {ours}
        for role, name in (("draft", "draft-0"), ("router", "router (Ray actor)")):
            [lost] = [one.info.worker_id for one in await stack.workers() if one.pid == pids[name]]
            os.kill(pids[name], signal.SIGKILL)
            event = await lost_event(store, lost)
            assert event["role"] == role and "lease" in event["reason"]


async def lost_event(store: MetadataStore, worker_id: str) -> dict[str, str]:
    async with asyncio.timeout(60):
        while True:
            for event in await store.events():
                if event.kind == EventKind.WORKER_LOST and event.fields.get("worker_id") == worker_id:
                    return {name: str(value) for name, value in event.fields.items()}
            await asyncio.sleep(0.2)
