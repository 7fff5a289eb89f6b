"""Grammars whose compilation may take for hours are first compiled in another process, which can be ended.

llguidance bounds its work, but for the intersection of expressions, whose cost grows exponentially with their number.
This file is also that process's program. It reads lines of JSON from its stdin: a `TrialSetting`, then grammars. It
writes a line when it is done with each.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.runtime.spawn import bound_to_us
from outrider.runtime.turns import deep_stacks

_MAX_START_S = 60.0
_BASE_BYTES, _BYTES_PER_CHAR = 24 << 20, 42
"""Of a process with a vocabulary, by the length of tokenizer.json; measured at 49,152, 151,936 and 262,144 tokens."""
# In Lark's notation, and in a schema of JSON, which may give one value several patterns and formats.
_MAY_INTERSECT = re.compile(r"[&~]|pattern|format")


@dataclass(frozen=True, slots=True)
class TrialSetting:
    """What all grammars of a target are compiled with."""

    vocabulary: str
    """The text of tokenizer.json."""
    vocab_size: int
    eos_token_ids: Sequence[int]
    limits: Mapping[str, int]
    """The library's."""
    most_bytes: int
    """That a compilation may take."""


def process_bytes(vocabulary_len: int, most_bytes: int) -> int:
    """What one process takes at most. `most_bytes`: of a compilation."""
    return _BASE_BYTES + _BYTES_PER_CHAR * vocabulary_len + most_bytes


class GrammarTrials:
    """Keeps a process for the next grammar. Thread-safe."""

    def __init__(self, setting: TrialSetting, max_s: float) -> None:
        self._setting = setting
        self._max_s = max_s
        self._idle: list[subprocess.Popen[bytes]] = []

    def prepare(self, grammar: str) -> None:
        """Starts a process for the grammar where it needs one. Takes a second, or many on a machine that is busy."""
        if _MAY_INTERSECT.search(grammar) and not self._idle:
            self._keep(_started(self._setting))

    def passes(self, grammar: str) -> bool:
        """Whether the grammar, be it right or wrong, is compiled within the limits of time and memory."""
        if not _MAY_INTERSECT.search(grammar):
            return True
        try:
            child = self._idle.pop()
        except IndexError:
            child = _started(self._setting)
        _write(child, grammar)
        if _answers(child, self._max_s):
            self._keep(child)
            return True
        _end(child)
        return False

    def _keep(self, child: subprocess.Popen[bytes]) -> None:
        self._idle.append(child)
        if len(self._idle) > 1:
            _end(self._idle.pop(0))


def _started(setting: TrialSetting) -> subprocess.Popen[bytes]:
    command = bound_to_us([sys.executable, "-m", "outrider.target.grammars.trial"])
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    _write(child, asdict(setting))
    _answers(child, _MAX_START_S)
    return child


def _answers(child: subprocess.Popen[bytes], max_s: float) -> bool:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], max_s)
    return bool(ready) and bool(os.read(child.stdout.fileno(), 1))


def _write(child: subprocess.Popen[bytes], value: object) -> None:
    """A process that has ended answers nothing."""
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.write(json.dumps(value).encode() + b"\n")
        child.stdin.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def _serve() -> None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    setting = TrialSetting(**json.loads(sys.stdin.readline()))
    tokenizer = LLTokenizer(
        setting.vocabulary, n_vocab=setting.vocab_size, eos_token=list(setting.eos_token_ids) or None
    )
    _bound_memory(setting.most_bytes)
    _answer()
    for line in sys.stdin:
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=LLParserLimits(**setting.limits))
        matcher.deep_copy().compute_ff_tokens()
        matcher.compute_bitmask()
        _answer()


def _answer() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


def _bound_memory(most_bytes: int) -> None:
    """Beyond what this process has now. Linux only."""
    if sys.platform == "linux":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        now_bytes = int(status["VmData"].split()[0]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (now_bytes + most_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    with deep_stacks():
        serving = threading.Thread(target=_serve)
        serving.start()
    serving.join()
