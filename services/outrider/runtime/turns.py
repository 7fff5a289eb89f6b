"""Threads that tenants use in turns, so that one tenant's work does not keep another's from starting."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from outrider.errors import OutriderError, without_frames

T = TypeVar("T")
_Work = tuple[Future[Any], Callable[[], Any]]
_STACK_BYTES = 256 << 20
_creating = threading.Lock()


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that the block starts have room for work that recurses once for each rule of a long grammar, as
    llguidance does: it would end the process on a usual stack. It is address space, of which little is used."""
    with _creating:
        before = threading.stack_size(_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


class TenantTurns:
    """Runs work in the order in which a tenant sent it; the tenants take turns. Its threads end with the process, or
    with `close`."""

    def __init__(
        self,
        num_threads: int,
        name: str,
        *,
        most_per_tenant: int | None = None,
        nice: int = 0,
        cores: Collection[int] = (),
    ) -> None:
        """`most_per_tenant`: threads that one tenant may use at once. `nice`: how far the threads, and processes that
        they start, yield to others. `cores`: where they run; none means where the process does."""
        self._most = num_threads if most_per_tenant is None else most_per_tenant
        self._nice, self._cores = nice, cores
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._closed = False
        with deep_stacks():
            for number in range(num_threads):
                threading.Thread(target=self._run, name=f"{name} {number}", daemon=True).start()

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """A future that is cancelled before a thread begins costs none."""
        future: Future[T] = Future()
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append((future, work))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancels what waits. Running work ends by itself."""
        with self._changed:
            self._closed = True
            for future, _ in itertools.chain.from_iterable(self._waiting.values()):
                future.cancel()
            self._changed.notify_all()

    def _run(self) -> None:
        if self._nice:
            # Of this thread alone (Linux).
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        if self._cores:
            os.sched_setaffinity(threading.get_native_id(), self._cores)
        while True:
            with self._changed:
                while (tenant := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                future, work = self._take(tenant)
            settle(future, work)
            # Or this thread would keep the last work's objects alive while it waits.
            del future, work
            with self._changed:
                self._running[tenant] -= 1
                self._running += Counter()
                self._changed.notify()

    def _next(self) -> str | None:
        return next((tenant for tenant in self._waiting if self._running[tenant] < self._most), None)

    def _take(self, tenant: str) -> _Work:
        taken = self._waiting[tenant].popleft()
        self._waiting.move_to_end(tenant)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._running[tenant] += 1
        return taken


def settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except OutriderError as error:
        # An answer like any other: nobody looks for the place that it comes from.
        future.set_exception(without_frames(error))
    except BaseException as error:
        future.set_exception(error)
    finally:
        # The error may refer to this frame.
        del future, work
