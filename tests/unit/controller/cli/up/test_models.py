"""The models of a stack are looked at before anything starts, and a process that ends says first why."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from outrider_controller.cli.exits import CommandError
from outrider_controller.cli.up.models import fetched
from outrider_controller.cli.up.process import ManagedProcess, ProcessFailed, ProcessSpec


async def test_a_fault_of_a_checkpoint_is_told_without_a_process(tiny: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    assert await fetched(str(copy), print) == copy
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CommandError, match=r"tokenizer\.json: missing"):
        await fetched(str(copy), print)


@pytest.mark.parametrize(
    ("script", "first"),
    [
        ("print('a record'); print('outrider.target: config.json: missing'); print('b')", "1: config.json: missing"),
        ("raise ImportError('no optimum')", "1: ImportError: no optimum"),
    ],
)
async def test_the_reason_comes_first_and_the_log_after(tmp_path: Path, script: str, first: str) -> None:
    argv = [sys.executable, "-c", f"{script}; raise SystemExit(1)"]
    process = ManagedProcess(ProcessSpec("target-0", argv, "127.0.0.1:1"), tmp_path / "target-0.log")
    await process.start()
    with pytest.raises(ProcessFailed) as raised:
        await process.ready(60)
    line, *rest = str(raised.value).splitlines()
    assert line.endswith(first)
    assert rest[0].endswith("target-0.log ends with:")
