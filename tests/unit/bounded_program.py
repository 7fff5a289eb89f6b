"""The program of a process in bounds, for tests: it does what it is asked."""

from __future__ import annotations

import os
import time

from outrider.runtime.bounded import Answer, serve


def _policy() -> int:
    return os.sched_getscheduler(0)


def make(setting: bytes) -> Answer:
    if setting == b"fault":
        raise ValueError

    def answer(question: bytes) -> bytes:
        started_s = time.process_time()
        match question:
            case b"loop":
                while True:
                    pass
            case b"fill":
                return bytes(1 << 40)
            case b"crash":
                os.abort()
            case b"policy" | b"long":
                # No longer: a busy machine leaves an idle process next to nothing.
                while question == b"long" and time.process_time() - started_s < 20 and _policy() == os.SCHED_OTHER:
                    pass
                return str(_policy()).encode()
            case b"pid":
                return str(os.getpid()).encode()
        return setting + question

    return answer


if __name__ == "__main__":
    serve(make)
