"""Imported by each Python process of a traced stack at its start: logs the calls of the product's functions.

One log for each process, in $OUTRIDER_WALKS, while the file `on` is there: the clock's nanoseconds, the function, the
thread, and the types of those arguments that are or hold a draft.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PRODUCT = ("/services/outrider/", "/controller/outrider_controller/")
_LOOK_S = 0.02


class CallLog:
    """All threads append to one list, which the interpreter's lock keeps whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: dict[CodeType, str | None] = {}
        self._calls: list[tuple[int, str, int, list[str]]] = []
        self._on = False

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        atexit.register(self._write)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self._on and event == "call":
            code = frame.f_code
            if code not in self._names:
                self._names[code] = _name(code)
            if (name := self._names[code]) is not None:
                types = list(filter(None, map(_draft_type, frame.f_locals.values())))
                self._calls.append((time.monotonic_ns(), name, threading.get_ident(), types))

    def _watch(self) -> None:
        switch = self._directory / "on"
        while True:
            was, self._on = self._on, switch.exists()
            if was and not self._on:
                self._write()
            time.sleep(_LOOK_S)

    def _write(self) -> None:
        calls, self._calls = self._calls, []
        if calls:
            file = self._directory / f"{os.getpid()}-{time.monotonic_ns()}.json"
            file.with_suffix(".part").write_text(json.dumps({"process": sys.orig_argv[2:3], "calls": calls}))
            file.with_suffix(".part").rename(file)


def _draft_type(value: Any) -> str:
    """Of a draft, a holder of one, or a list of such; empty for anything else."""
    kind = type(value[0] if isinstance(value, (list, tuple)) and value else value)
    if (message := getattr(kind, "DESCRIPTOR", None)) is not None:
        holds = not {"parents", "drafts"}.isdisjoint(message.fields_by_name)
    else:
        holds = any(not callable(getattr(kind, name, len)) for name in ("parents", "draft", "tree"))
    return kind.__name__ if holds else ""


def _name(code: CodeType) -> str | None:
    """FILE:FUNCTION of the product's, without comprehensions and generated code."""
    for root in _PRODUCT:
        _, found, file = code.co_filename.partition(root)
        if found and "/rpc/v1/" not in found + file and not code.co_name.startswith("<"):
            return f"{root.strip('/').split('/')[-1]}/{file}:{code.co_qualname}"
    return None


if (_directory := os.environ.get("OUTRIDER_WALKS")) is not None:
    CallLog(Path(_directory)).start()
