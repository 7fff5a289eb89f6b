"""How much memory grammars hold, by an estimate that is never below it, and the bound on that. Thread-safe.

llguidance says nothing of bytes. It counts the work of its lexer and the items of its parser, and memory grows with
these: the factors are above the largest that were measured, over hostile schemas, expressions and grammars.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.runtime.freed import release_memory_soon, start_releasing

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BASE_BYTES = 128 << 10
_BYTES_PER_CHAR = 500
_BYTES_PER_COST = 48
_BYTES_PER_ITEM = 24
_BYTES_PER_ROW = 96
_COPIES = 2
_COUNTS = re.compile(r'"(lexer_cost|all_items|rows)": (\d+)')
TENANT_SHARE = 0.5
"""Share of the bound that one tenant's grammars may hold. The rest is for the others."""
_FREED_SHARE = 1 / 16
"""Of the bound; so much that is free again goes back to the system at once."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one matcher."""

    shared: int
    """Of the grammar and its lexer, which all copies share."""
    own: int
    """Of this matcher's place in the grammar."""


def footprint(matcher: LLMatcher, num_chars: int, vocab_size: int) -> Footprint:
    """`num_chars`: of the grammar. The matcher stays as it is."""
    copy = matcher.deep_copy()
    # The counts are in the error of a matcher alone; no vocabulary has this token.
    copy.consume_token(vocab_size + 1)
    counts = {name: int(count) for name, count in _COUNTS.findall(copy.get_error())}
    shared = _BASE_BYTES + _BYTES_PER_CHAR * num_chars + _BYTES_PER_COST * counts.get("lexer_cost", 0)
    # The library keeps a mask in each copy.
    own = (
        _COPIES * vocab_size // 8
        + _BYTES_PER_ITEM * counts.get("all_items", 0)
        + _BYTES_PER_ROW * counts.get("rows", 0)
    )
    return Footprint(shared, own)


class GrammarMemory:
    """What is held, by owner, and by the tenant that is charged for it."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._freed_bytes = 0
        start_releasing()
        # Reentrant: a release may run wherever an object ends, also within `hold`.
        self._lock = threading.RLock()
        self._held: dict[object, tuple[str, int]] = {}
        self._of_tenant: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(self._of_tenant.values())

    def hold(self, owner: object, tenant: str, num_bytes: int) -> bool:
        """Sets what `owner` holds. False, and nothing is changed, where that is above the bound or the tenant's share
        of it."""
        with self._lock:
            charged, before = self._held.get(owner, (tenant, 0))
            more = num_bytes - before
            total, of_tenant = sum(self._of_tenant.values()) + more, self._of_tenant[charged] + more
            if more > 0 and (total > self.most_bytes or of_tenant > TENANT_SHARE * self.most_bytes):
                return False
            self._held[owner] = charged, num_bytes
            self._of_tenant[charged] = of_tenant
            return True

    def release(self, owner: object) -> None:
        with self._lock:
            tenant, num_bytes = self._held.pop(owner, ("", 0))
            self._of_tenant[tenant] -= num_bytes
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
            self._freed_bytes += num_bytes
            if self._freed_bytes > _FREED_SHARE * self.most_bytes:
                self._freed_bytes = 0
                release_memory_soon()
