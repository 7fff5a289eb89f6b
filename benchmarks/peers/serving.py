"""The common part of all peer scripts: a process that answers one line of JSON with one line of JSON.

A peer loads its model once and keeps running, so that its measurements can take turns with another's, seconds apart, on
the same core. Standard library only, because each peer runs this in its own environment. Knows no model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Measures = Mapping[str, Callable[..., dict[str, Any]]]


def private_stdout() -> TextIO:
    """Returns the real stdout; later output of libraries goes to stderr."""
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return ours


def timed_ms(work: Callable[[], object]) -> float:
    """Duration of one call, in milliseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def answer(measures: Measures, line: str) -> dict[str, Any]:
    """The reply to {"do": name, ...arguments}. A failure is a reply too.

    core_share shows whether another process used the core meanwhile.
    """
    try:
        request = json.loads(line)
        start, used = time.perf_counter(), time.process_time()
        result = measures[request.pop("do")](**request)
        share = (time.process_time() - used) / (time.perf_counter() - start)
        return {"ok": {**result, "core_share": share}}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def serve(load: Callable[..., tuple[Measures, dict[str, Any]]]) -> None:
    """Loads the model from the command line's arguments, writes `load`'s information, and answers until stdin ends."""
    out = private_stdout()
    start = time.perf_counter()
    measures, about = load(*sys.argv[1:])
    print(json.dumps({"ok": {**about, "load_s": round(time.perf_counter() - start, 1)}}), file=out)
    for line in sys.stdin:
        print(json.dumps(answer(measures, line)), file=out)
