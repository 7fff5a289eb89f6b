"""Child processes that die with us and keep to their cores, started without a copy of this process.

A `preexec_fn` needs a fork, and gRPC's fork handlers may end the child of a process whose threads are inside gRPC
before it executes anything. So this file is also the program that a child begins as; it becomes the command. Knows
nothing of what it starts.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence

_PR_SET_PDEATHSIG = 1


def bound_to_us(argv: Sequence[str], cores: Iterable[int] = ()) -> list[str]:
    """What to execute so that `argv` gets SIGTERM when the thread that starts it ends, and runs on `cores` only.

    No cores means all. On Linux; elsewhere `argv` itself. Raises FileNotFoundError when there is no such program.
    """
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(f"no such program: {argv[0]}")
    if sys.platform != "linux":
        return list(argv)
    # Isolated and without site-packages: it starts in some 10 ms, and modules beside this file hide none of Python's.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), ",".join(map(str, cores)), *argv]


def _become(parent: int, cores: str, argv: list[str]) -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have died before it was asked for.
    if os.getppid() != parent:
        sys.exit(1)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
