"""No process of a stack holds more memory the more requests it has served."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider.testing.tiny import tiny_checkpoint
from outrider_controller.cli.up.stack_config import StackConfig

from tests.soak.memory import problems, watch

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("num_requests", [1_500])
async def test_after_the_first_requests_no_process_grows(tmp_path: Path, num_requests: int) -> None:
    """`python -m tests.soak memory` does it with as many as one likes, and with real models."""
    tiny = str(tiny_checkpoint(tmp_path / "tiny", max_context_len=1024))
    config = StackConfig(target_model=tiny, draft_model=tiny, targets=2, run_dir=tmp_path / "run")
    watched = await watch(config, num_requests, 16, 0, lambda done, note: None)
    assert problems(watched, num_requests // 3) == []
    assert watched.outcomes["complete"] > num_requests / 2
