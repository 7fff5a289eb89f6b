"""The command of docs/bring-your-vllm.md, as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.vllm.processes import free_address
from tests.vllm.test_serve import Draft, await_drafts
from tests.vllm.vllm_serve import OPTIONS, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PAGE = Path(__file__).resolve().parents[2] / "docs/bring-your-vllm.md"
_NOT_HERE = ("--tensor-parallel-size", "--max-num-seqs")
"""Flags of the page with another value in these tests."""


def documented(address: str) -> list[str]:
    """The flags after the model, with this draft worker."""
    found = re.search(r"vllm serve \S+ (.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    flags = shlex.split(found[1].replace("\\\n", "\n"))
    places = [place for place, flag in enumerate(flags) if flag in _NOT_HERE]
    kept = [flag for place, flag in enumerate(flags) if place not in places and place - 1 not in places]
    most = OPTIONS[OPTIONS.index("--max-num-seqs") + 1]
    return [flag.replace("10.0.0.7:9000", address).replace("256", most) for flag in kept]


def test_the_documented_command_serves_with_drafts(tiny_served: Path) -> None:
    draft = Draft(tiny_served, free_address())
    draft.start()
    try:
        with serving(tiny_served, *documented(draft.address)) as server:
            await_drafts(server)
    finally:
        draft.kill()
