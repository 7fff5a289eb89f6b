"""The program of a process in bounds, for tests: it does what it is asked."""

from __future__ import annotations

import os
import time

from outrider.runtime.bounded import Answer, serve


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
                while question == b"long" and time.process_time() - started_s < 0.8:
                    pass
                return str(os.sched_getscheduler(0)).encode()
            case b"pid":
                return str(os.getpid()).encode()
        return setting + question

    return answer


if __name__ == "__main__":
    serve(make)
