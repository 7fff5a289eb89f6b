"""Logs on stderr: one JSON object per line, or on a terminal one short line for people.

Requests are logged by id, counts and hashes, never with their text. Exceptions are logged by type and traceback,
without the message, which may quote a client's text. Repeated warnings are limited by rate.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

LOG_FORMATS = ("auto", "human", "json")
"""auto: human on a terminal, json elsewhere."""

_MAX_VALUE_CHARS = 200
# `color_message` is uvicorn's copy of the message with terminal colours.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def configure_logging(
    component: str,
    log_format: str = "auto",
    *,
    level: int | str = logging.INFO,
    stream: TextIO | None = None,
) -> None:
    """Sets up the process's logs; to be called once, in its main. Raises ValueError for an unknown format or level."""
    check_log_format(log_format)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    human = log_format == "human" or (log_format == "auto" and handler.stream.isatty())
    handler.setFormatter(HumanFormatter(component) if human else JsonFormatter(component))
    handler.addFilter(RateLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # At INFO these log single connections and requests.
    for name in ("asyncio", "httpx", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


def check_log_format(log_format: str) -> None:
    """Raises ValueError for an unknown one."""
    if log_format not in LOG_FORMATS:
        raise ValueError(f"log_format: {log_format!r} is not one of {', '.join(LOG_FORMATS)}")


def name_worker(worker_id: str) -> None:
    """Sets the `worker_id` of this process's JSON lines, except those about another worker."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.worker_id = worker_id


class JsonFormatter(logging.Formatter):
    def __init__(self, component: str) -> None:
        super().__init__()
        self.worker_id = ""
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _timestamp(record),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
            **({"worker": self.worker_id} if self.worker_id else {}),
            **_fields(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
            line["stack"] = _frames(record.exc_info[2])
        return json.dumps(line, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{clock} {record.levelname[0]} {self._component}: {record.getMessage()}{fields}"
        if record.exc_info and record.exc_info[0] is not None:
            line += f"\n{record.exc_info[0].__name__}\n{_frames(record.exc_info[2])}"
        return line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields from `extra=`. Numbers stay numbers; everything else becomes a short string."""
    found = vars(record).items()
    # A leading underscore marks a library's own fields, such as the time that Ray adds to every record.
    return {name: _plain(value) for name, value in found if name not in _STANDARD and not name.startswith("_")}


def _plain(value: object) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)[:_MAX_VALUE_CHARS]


def _frames(trace: TracebackType | None) -> str:
    return "".join(traceback.format_list(traceback.extract_tb(trace))).rstrip()


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


# A bound, because some libraries put values into their messages, so that every record is another kind.
_MAX_KINDS = 1024


@dataclass(slots=True)
class _Window:
    began_s: float
    num_passed: int = 0
    num_suppressed: int = 0


class RateLimit(logging.Filter):
    """For a logger or a handler. Passes warnings and errors of one kind `limit` times in `interval_s`.

    A kind is a logger, a level and a message before its arguments. The first record that passes after suppressed ones
    has their number in its field `num_suppressed`. Levels below warning always pass.
    """

    def __init__(self, limit: int = 10, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = limit
        self._interval_s = interval_s
        self._clock = clock
        self._windows: OrderedDict[tuple[str, int, str], _Window] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        window = self._window((record.name, record.levelno, str(record.msg)))
        if window.num_passed >= self._limit:
            window.num_suppressed += 1
            return False
        window.num_passed += 1
        if window.num_suppressed:
            record.num_suppressed = window.num_suppressed
            window.num_suppressed = 0
        return True

    def _window(self, kind: tuple[str, int, str]) -> _Window:
        now_s = self._clock()
        window = self._windows.setdefault(kind, _Window(now_s))
        self._windows.move_to_end(kind)
        if len(self._windows) > _MAX_KINDS:
            self._windows.popitem(last=False)
        if now_s - window.began_s >= self._interval_s:
            window.began_s, window.num_passed = now_s, 0
        return window
