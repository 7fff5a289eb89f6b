"""The plugin in vLLM's own server, with a draft worker that sends garbage and with code that raises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider.rpc.v1 import sequence_pb2 as sp

from tests.integration.target.test_server import ScriptedDraft
from tests.vllm import faulty
from tests.vllm.test_serve import drafted
from tests.vllm.vllm_serve import REPETITIVE, Server, plugin, scripted, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

VOCAB = 384
GARBAGE: dict[str, dict[str, Any]] = {
    "beyond the vocabulary": {"token_ids": [5, VOCAB]},
    "far beyond it": {"token_ids": [2**32 - 1]},
    "too many": {"token_ids": [5] * 5000},
    "inside the prompt": {"token_ids": [5], "base_len": 1},
    "no tree": {"token_ids": [5, 5], "parents": [-1, 7]},
    "never right": {"token_ids": [VOCAB - 1] * 4},
}


class HostileDraft(ScriptedDraft):
    """Says the same of every sequence."""

    def __init__(self) -> None:
        super().__init__(self._say)
        self.says: dict[str, Any] = {}
        self.said = 0

    def _say(self, sequence_id: int, base_len: int) -> sp.Draft:
        self.said += 1
        return sp.Draft(**{"sequence_id": sequence_id, "base_len": base_len, **self.says})


@pytest.fixture(scope="module")
def draft() -> Iterator[HostileDraft]:
    made = HostileDraft()
    with scripted(made):
        yield made


@pytest.fixture(scope="module")
def plain(tiny_served: Path) -> str:
    """The answer of vLLM as it is. Its process has ended when the other begins."""
    with serving(tiny_served) as server:
        return server.answer(REPETITIVE, max_tokens=max(faulty.PLACES), ignore_eos=True)


@pytest.fixture(scope="module")
def server(tiny_served: Path, plain: str, draft: HostileDraft) -> Iterator[Server]:
    config = {"drafts": [draft.address], "lookups": ["ngram"], "row_price": 0}
    scheduler = "--scheduler-cls", f"{faulty.__name__}.{faulty.Scheduler.__name__}"
    with serving(tiny_served, *plugin(**config), *scheduler) as made:
        yield made


def answer(server: Server, max_tokens: int) -> str:
    return server.answer(REPETITIVE, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_of_a_draft_worker_changes_no_text(server: Server, draft: HostileDraft, plain: str, kind: str) -> None:
    draft.says = GARBAGE[kind]
    texts: list[str] = []

    def said_once_more() -> bool:
        before = draft.said
        texts.append(answer(server, 60))
        return draft.said > before

    # The worker is asked again in the next answer.
    for _ in range(2):
        until(said_once_more)
    assert all(plain.startswith(text) for text in texts) and len(texts[-1]) > 30


@pytest.mark.parametrize(("max_tokens", "place"), faulty.PLACES.items())
def test_a_fault_in_scheduler_code_ends_the_drafts_of_a_request_and_not_the_server(
    server: Server, draft: HostileDraft, plain: str, max_tokens: int, place: str
) -> None:
    draft.says = {}
    texts: list[str] = []
    with_fault = drafted(server, lambda: texts.append(answer(server, max_tokens)))
    without = drafted(server, lambda: texts.append(answer(server, 200)))
    assert all(plain.startswith(text) for text in texts), place
    assert 0 < with_fault < without / 2
