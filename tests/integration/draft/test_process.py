"""python -m outrider.draft, from the command line."""

from __future__ import annotations

import asyncio
import sys

import pytest


@pytest.mark.slow
async def test_a_missing_model_ends_the_process_with_a_message_that_names_it() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.draft", "--model", "/nowhere", "--listen", "127.0.0.1:0", stderr=-1
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"/nowhere" in stderr
    assert b"Traceback" not in stderr
