"""Whatever function of ours raises where vLLM calls us: no request fails, no text changes, and drafts come back."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import outrider
import pytest

from tests.vllm.second_runner import Case, Plan, answers, engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

_OURS = str(Path(outrider.__file__).parent)
_UNGUARDED = ("Scheduler._safely", "_following")
"""The guard; and what decides which rows a grammar masks, in whose place there is nothing else."""
_OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
GROUP: list[Case] = [
    {"prompt": [5, 6, 7, 8] * 4, "options": _OPTIONS},
    {"prompt": [6, 7, 8, 9] * 4, "options": _OPTIONS | {"temperature": 0.8, "seed": 3}},
    {"prompt": [5, 5, 5, 5] * 4, "options": _OPTIONS | {"json": True, "ignore_eos": False}},
]


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def llm(tiny_vllm: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    # Nobody listens there: the thread of the network is told of all, and drafts are those of the lookups.
    config = {"lookups": ["ngram", "suffix"], "drafts": ["127.0.0.1:9"], "row_price": 0}
    more = {"scheduler_cls": "outrider.vllm.plugin.Scheduler", "additional_config": {"outrider": config}}
    with engine(Plan(str(tiny_vllm), asynchronous=request.param, more=more), drafts=True) as made:
        yield made


class Calls:
    """Those of functions of ours by others of ours, on this thread, with the caller. `planted`: raises after so many of
    these."""

    def __init__(self, planted: tuple[CodeType, CodeType] | None = None, after: int = 0) -> None:
        self.found = Counter[tuple[CodeType, CodeType]]()
        self._planted, self._after = planted, after

    def __enter__(self) -> Self:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_OURS) or frame.f_back is None:
            return
        before = frame.f_back.f_code
        # What vLLM calls, and what such a method calls by `super()`, is a few lines around that which is guarded.
        if not before.co_filename.startswith(_OURS) or before.co_name == code.co_name or code.co_name.startswith("<"):
            return
        if code.co_qualname in _UNGUARDED:
            return
        call = before, code
        self.found[call] += 1
        if call == self._planted and self.found[call] > self._after:
            raise RuntimeError(f"planted in {code.co_qualname}")


def test_any_function_of_ours_may_raise(llm: Any) -> None:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    wanted = answers(llm, GROUP)
    with Calls() as calls:
        scheduler.reset_prefix_cache()
        assert answers(llm, GROUP) == wanted
    assert len(calls.found) > 50
    for call, count in calls.found.items():
        scheduler.reset_prefix_cache()
        with Calls(call, count // 2):
            assert answers(llm, GROUP) == wanted, " calls ".join(code.co_qualname for code in call)


def test_an_engine_that_has_slept_answers_as_before(llm: Any) -> None:
    wanted = answers(llm, GROUP)
    llm.sleep(level=1)
    llm.wake_up()
    assert answers(llm, GROUP) == wanted
