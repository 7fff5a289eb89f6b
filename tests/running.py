"""How tests run: the time limit of each, and which worker of xdist gets what. A test that hangs, or that ends its
process, fails alone."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Generator
from typing import Any

import pytest
import pytest_timeout
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_AGAIN_S = 30.0
# A lock that is held in C hears no signal: then the process ends, and xdist starts another.
_GIVE_UP = 3
_LIMIT = pytest.StashKey[Any]()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Instead of pytest-timeout's one timer for the whole test: a signal between two phases ends the whole run."""
    item.stash[_LIMIT] = settings
    return True


def _limited(item: pytest.Item) -> Generator[None, Any, Any]:
    if (settings := item.stash.get(_LIMIT, None)) is None:
        return (yield)
    signal.signal(signal.SIGALRM, lambda *_: pytest_timeout.timeout_sigalrm(item, settings))
    # Again: a task of asyncio that nobody awaits, or a destructor, may have swallowed the first.
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN_S)
    faulthandler.dump_traceback_later(_GIVE_UP * settings.timeout, exit=True)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """A file goes to one worker as a whole, and so do all that share the stack of the e2e tier."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/e2e" if nodeid.startswith("tests/e2e/") else str(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Every other worker begins with unit tests: they compute while those of the other tiers wait for processes."""
        if self.nodes.index(node) % 2:
            for scope in self.workqueue:
                if scope.startswith("tests/unit/"):
                    self.workqueue.move_to_end(scope, last=False)
                    break
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """xdist would give the test that ended its worker to the next worker, and to the one after that. It would also
        queue again what the worker had done: who is given such a unit has nothing to run, and waits for ever.
        """
        work = self.assigned_work[node]
        crashed = next((test for unit in work.values() for test, done in unit.items() if not done), None)
        for scope, unit in list(work.items()):
            if crashed in unit:
                unit[crashed] = True
            if all(unit.values()):
                del work[scope]
        super().remove_node(node)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
