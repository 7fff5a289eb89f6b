"""The program of a process in bounds, for tests: it does what it is asked."""

from __future__ import annotations

import os

from outrider.runtime.bounded import Answer, serve


def make(setting: bytes) -> Answer:
    def answer(question: bytes) -> bytes:
        match question:
            case b"loop":
                while True:
                    pass
            case b"fill":
                return bytes(1 << 40)
            case b"crash":
                os.abort()
            case b"pid":
                return str(os.getpid()).encode()
        return setting + question

    return answer


if __name__ == "__main__":
    serve(make)
