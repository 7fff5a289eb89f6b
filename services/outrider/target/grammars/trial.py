"""The program of a process that compiles a grammar and tries it, before its target does: see `runtime.bounded`.

llguidance bounds much of its work, but not all: not that of intersections, for one. So what it takes of time and memory
is bounded by the process. What it then does at each place of a text is tried on a few texts, drawn from the grammar by
fixed chances: a grammar that reaches a limit there is refused before the first token of any answer.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.runtime.bounded import Answer, serve
from outrider.runtime.freed import release_memory
from outrider.runtime.turns import deep_stacks

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BASE_BYTES, _BYTES_PER_CHAR = 24 << 20, 42
"""Of a process with a vocabulary, by the length of tokenizer.json; measured at 49,152, 151,936 and 262,144 tokens."""
_TEXTS, _TEXT_TOKENS = 3, 64
TOO_COMPLEX = "is too complex: a limit of the library was reached"


@dataclass(frozen=True, slots=True)
class TrialSetting:
    """What all grammars of a target are tried with."""

    vocabulary: str
    """The text of tokenizer.json."""
    vocab_size: int
    eos_token_ids: Sequence[int]
    limits: Mapping[str, int]
    """The library's."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What came of one."""

    fault: str = ""
    """Empty if the grammar can be followed."""
    peak_bytes: int = 0
    """What it took of the memory; 0 where that is not known."""

    @staticmethod
    def from_bytes(found: bytes) -> TrialResult:
        return TrialResult(**json.loads(found))

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def process_bytes(vocabulary_len: int, most_bytes: int) -> int:
    """What one process takes at most. `most_bytes`: of a compilation."""
    return _BASE_BYTES + _BYTES_PER_CHAR * vocabulary_len + most_bytes


def make(given: bytes) -> Answer:
    """Answers grammars."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    setting = TrialSetting(**json.loads(given))
    eos = list(setting.eos_token_ids)
    tokenizer = LLTokenizer(setting.vocabulary, n_vocab=setting.vocab_size, eos_token=eos or None)
    limits = LLParserLimits(**setting.limits)

    def fault_of(grammar: str) -> str:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            # The rest of the library's message is its internal state.
            return matcher.get_error().partition("\n")[0] or "is invalid"
        reached = any(_reaches_limit(matcher.deep_copy(), eos, random.Random(text), text) for text in range(_TEXTS))
        return TOO_COMPLEX if reached else ""

    def answer(grammar: bytes) -> bytes:
        before_bytes = _resident_bytes(peak=False)
        fault = fault_of(grammar.decode())
        found = TrialResult(fault, max(0, _resident_bytes(peak=True) - before_bytes))
        release_memory()
        return found.to_bytes()

    return answer


def _resident_bytes(*, peak: bool) -> int:
    """Of this process: now, from when on the peak is counted anew, or the peak since then. Linux only."""
    if sys.platform != "linux":
        return 0
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return int(status["VmHWM" if peak else "VmRSS"].split()[0]) << 10


def _reaches_limit(matcher: LLMatcher, eos: Sequence[int], chance: random.Random, again: int) -> bool:
    """Whether a text reaches a limit. With `again` 0 it repeats each token while it may: repetitions within repetitions
    reach theirs so."""
    last = -1
    for _ in range(_TEXT_TOKENS):
        mask = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            return True
        for token_id in eos:
            mask[token_id // 8] &= ~(1 << token_id % 8)
        if not any(mask):
            return False
        if again or last < 0 or not mask[last // 8] >> last % 8 & 1:
            last = _drawn(bytes(mask), chance)
        if not matcher.consume_token(last):
            return True
    matcher.compute_bitmask()
    return bool(matcher.is_error())


def _drawn(mask: bytes, chance: random.Random) -> int:
    """A token of those in the mask, which has one."""
    start = chance.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    skipped = len(turned) - len(turned.lstrip(b"\0"))
    place = (start + skipped) % len(mask)
    return 8 * place + chance.choice([bit for bit in range(8) if mask[place] >> bit & 1])


if __name__ == "__main__":
    with deep_stacks():
        serving = threading.Thread(target=serve, args=[make])
        serving.start()
    serving.join()
