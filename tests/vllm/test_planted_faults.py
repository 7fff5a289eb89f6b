"""Whatever function of ours raises where vLLM calls us: no request fails, no text changes, and drafts come back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import outrider
import pytest

from tests.vllm.second_runner import Case, Plan, answers, engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

_OURS = str(Path(outrider.__file__).parent)
_OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
GROUP: list[Case] = [
    {"prompt": [5, 6, 7, 8] * 4, "options": _OPTIONS},
    {"prompt": [6, 7, 8, 9] * 4, "options": _OPTIONS | {"temperature": 0.8, "seed": 3}},
    {"prompt": [5, 5, 5, 5] * 4, "options": _OPTIONS | {"json": True, "ignore_eos": False}},
]


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def llm(tiny_vllm: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    # Nobody listens there: the thread of the network is told of all, and drafts are those of the lookups.
    config = {"lookups": ["ngram", "suffix"], "drafts": ["127.0.0.1:9"], "row_price": 0, "max_wait_ms": 1}
    more = {"scheduler_cls": "outrider.vllm.plugin.Scheduler", "additional_config": {"outrider": config}}
    with engine(Plan(str(tiny_vllm), asynchronous=request.param, more=more), drafts=True) as made:
        yield made


class Calls:
    """Those of functions of ours on this thread, by vLLM or by others of ours."""

    def __init__(self, planted: CodeType | None = None, after: int = 0) -> None:
        self.found: dict[CodeType, int] = {}
        self.raised = False
        self._planted, self._after = planted, after

    def __enter__(self) -> Calls:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_OURS):
            return
        self.found[code] = self.found.get(code, 0) + 1
        if code is self._planted and self.found[code] > self._after:
            self.raised = True
            raise RuntimeError(f"planted in {code.co_qualname}")


def is_called_by_vllm(code: CodeType) -> bool:
    return False


def test_any_function_of_ours_may_raise(llm: Any) -> None:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    wanted = answers(llm, GROUP)
    scheduler.reset_prefix_cache()
    with Calls() as calls:
        assert answers(llm, GROUP) == wanted
    for code, count in sorted(calls.found.items(), key=lambda one: one[0].co_qualname):
        print(code.co_filename.removeprefix(_OURS), code.co_qualname, count)
    failed = []
    for code, count in calls.found.items():
        before = scheduler.num_faults
        scheduler.reset_prefix_cache()
        with Calls(code, count // 2) as planted:
            try:
                texts = answers(llm, GROUP)
                if texts != wanted:
                    failed.append((code.co_qualname, "text"))
            except RuntimeError as error:
                failed.append((code.co_qualname, str(error)))
                scheduler.finish_requests(list(scheduler.requests), 5)
                break
        print(code.co_qualname, planted.raised, scheduler.num_faults - before, failed[-1:], flush=True)
    assert not failed
