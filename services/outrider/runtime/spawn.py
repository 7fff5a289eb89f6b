"""Starts child processes that die with this one and stay on their cores, without forking a copy of this process.

A `preexec_fn` needs a fork, and while threads are inside gRPC, its fork handlers may end the child before it executes
anything. So this file is also a program: a child starts as it, and it executes the command.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence

_PR_SET_PDEATHSIG = 1


def bound_to_us(argv: Sequence[str], cores: Iterable[int] = (), sooner: int = 0) -> list[str]:
    """A command that runs `argv` so that it gets SIGTERM when the thread that starts it ends, and runs on `cores` only.

    No cores means all. `sooner`: where memory is short the kernel ends it before us, the sooner the higher (to 1000).
    Linux only; elsewhere returns `argv`. Raises FileNotFoundError when there is no such program.
    """
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(f"no such program: {argv[0]}")
    if sys.platform != "linux":
        return list(argv)
    # Isolated and without site-packages: it starts in some 10 ms, and modules next to this file hide none of Python's.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), ",".join(map(str, cores)), str(sooner), *argv]


def _become(parent: int, cores: str, sooner: int, argv: list[str]) -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before the request took effect.
    if os.getppid() != parent:
        sys.exit(1)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    if sooner:
        # Everybody may raise it.
        with open("/proc/self/oom_score_adj") as score:
            raised = min(1000, int(score.read()) + sooner)
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(str(raised))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
