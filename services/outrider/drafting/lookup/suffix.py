"""Drafts from what was answered before: texts that end as this one does are likely to go on as this one will.

SuffixDecoding (Oliaro et al. 2024). It is strong where answers repeat from request to request, as an agent's edits do.
A text is found only under the cache salt of the request that made it.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

from outrider.drafting.lookup.source import REACH, Found, LookupDrafts
from outrider.drafting.source import CloseReason, DraftSource, register
from outrider.sequence.key import SequenceKey
from outrider.sequence.spec import SequenceSpec

NAME = "suffix"
# Measured of CPython: the token, its run as a dictionary's key, and its place in the list of that run.
_BYTES_PER_TOKEN = 320


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """How much is remembered, and how a continuation is found."""

    total_bytes: int = 64_000_000
    """Memory of all texts. The text that was used longest ago is forgotten first."""
    salt_bytes: int = 16_000_000
    """Memory of the texts of one cache salt."""
    text_tokens: int = 4096
    """Most tokens of a text that are kept, the first ones."""
    context: int = 32
    """Tokens of the prompt's end that are kept before the answer, so that a question that is asked again is found."""
    min_match: int = 4
    """Shortest run of tokens that counts as a match."""
    max_match: int = 32
    candidates: int = 32
    """Places of a run that are compared, the newest ones."""
    least_share: float = 0.3
    """A proposal ends where the likeliest path has been taken by less than this share of the matches."""


@dataclass(slots=True)
class _Past:
    """The texts of one salt, in the order of their last use, and the places of each run of tokens."""

    tenant: str = ""
    """Whose salt it is."""
    texts: OrderedDict[int, array[int]] = field(default_factory=OrderedDict)
    places: defaultdict[bytes, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Run → (text, position after the run), oldest first."""
    num_tokens: int = 0


class History:
    """Texts by cache salt, within bounds. Who may meet another thread here holds the lock."""

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config or SuffixConfig()
        self.lock = Lock()
        # In the order of their last use.
        self._pasts: OrderedDict[bytes, _Past] = OrderedDict()
        self._serial = 0

    @property
    def num_bytes(self) -> int:
        return sum(past.num_tokens for past in self._pasts.values()) * _BYTES_PER_TOKEN

    def add(self, salt: bytes, tokens: Sequence[int], tenant: str = "") -> None:
        """Remembers a text, and forgets others where there is no room."""
        config = self.config
        text = array("i", tokens[: min(config.text_tokens, config.salt_bytes // _BYTES_PER_TOKEN)])
        if len(text) <= config.min_match:
            return
        past = self._pasts.setdefault(salt, _Past(tenant))
        self._pasts.move_to_end(salt)
        self._serial += 1
        past.texts[self._serial] = text
        past.num_tokens += len(text)
        for end in range(config.min_match, len(text)):
            past.places[text[end - config.min_match : end].tobytes()].append((self._serial, end))
        while past.num_tokens * _BYTES_PER_TOKEN > config.salt_bytes:
            self._forget_oldest(past)
        while self.num_bytes > config.total_bytes:
            oldest = next(iter(self._pasts.values()))
            self._forget_oldest(oldest)
            if not oldest.texts:
                self._pasts.popitem(last=False)

    def erase(self, tenant: str) -> int:
        """Forgets all texts of a tenant; returns how many."""
        salts = [salt for salt, past in self._pasts.items() if past.tenant == tenant]
        return sum(len(self._pasts.pop(salt).texts) for salt in salts)

    def find(self, salt: bytes, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
        """At most `count` tokens that followed the longest match of the end of `tokens`, and its length."""
        past = self._pasts.get(salt)
        if past is None:
            return [], 0
        matched, places = self._longest(past, array("i", tokens[-self.config.max_match :]))
        if not places:
            return [], 0
        self._pasts.move_to_end(salt)
        for number, _ in places:
            past.texts.move_to_end(number)
        return self._vote(past, places, min(count, REACH * matched)), matched

    def _longest(self, past: _Past, tail: array[int]) -> tuple[int, list[tuple[int, int]]]:
        """The length of the longest match, and the places where it ends."""
        size = self.config.min_match
        longest = 0
        best: list[tuple[int, int]] = []
        for number, end in past.places.get(tail[-size:].tobytes(), [])[-self.config.candidates :]:
            text, length = past.texts[number], size
            while length < min(len(tail), end) and text[end - 1 - length] == tail[-1 - length]:
                length += 1
            if length > longest:
                longest, best = length, []
            if length == longest:
                best.append((number, end))
        return longest, best

    def _vote(self, past: _Past, places: list[tuple[int, int]], count: int) -> list[int]:
        """The commonest way on, token by token; of equally common ones the newest."""
        found: list[int] = []
        # Newest first: Counter keeps the order in which it met its keys.
        alive, num_places = places[::-1], len(places)
        while len(found) < count:
            following = [
                (past.texts[number][end], number, end) for number, end in alive if end < len(past.texts[number])
            ]
            if not following:
                break
            [(token, votes)] = Counter(token for token, _, _ in following).most_common(1)
            if votes < self.config.least_share * num_places:
                break
            found.append(token)
            alive = [(number, end + 1) for each, number, end in following if each == token]
        return found

    def _forget_oldest(self, past: _Past) -> None:
        number, text = past.texts.popitem(last=False)
        past.num_tokens -= len(text)
        size = self.config.min_match
        for run in {text[end - size : end].tobytes() for end in range(size, len(text))}:
            past.places[run] = [place for place in past.places[run] if place[0] != number]
            if not past.places[run]:
                del past.places[run]


@register(NAME)
def suffixes() -> DraftSource:
    return SuffixDrafts(History())


class SuffixLookup:
    """One sequence's text, from the end of its prompt on."""

    def __init__(self, spec: SequenceSpec, tokens: Sequence[int], history: History) -> None:
        self.tenant = spec.tenant
        self.forgotten = not spec.learns
        """Whether the text is not to be remembered."""
        self._history = history
        self._salt = spec.salt
        self._tokens = tokens
        self._start = max(0, len(spec.prompt) - history.config.context)

    def find(self, count: int) -> Found:
        end = self._tokens[max(self._start, len(self._tokens) - self._history.config.max_match) :]
        with self._history.lock:
            return self._history.find(self._salt, end, count)

    def remember(self) -> None:
        """Makes the text known to later sequences of its salt."""
        if not self.forgotten:
            self._history.add(self._salt, self._tokens[self._start :], self.tenant)


class SuffixDrafts(LookupDrafts):
    """Lookups in one history, which learns each text when its sequence closes."""

    def __init__(self, history: History) -> None:
        super().__init__(NAME, lambda spec, tokens: SuffixLookup(spec, tokens, history))
        self.history = history

    def close(self, key: SequenceKey, reason: CloseReason) -> None:
        # An erasure finds each text either running or remembered.
        with self.history.lock:
            text = self._texts.get(key)
            super().close(key, reason)
            # One that moved goes on elsewhere, and is learnt there.
            if text is not None and reason is not CloseReason.MOVED and isinstance(text.lookup, SuffixLookup):
                text.lookup.remember()

    def erase(self, tenant: str) -> int:
        with self.history.lock:
            # Copied at once: other texts may be opened meanwhile.
            for text in list(self._texts.values()):
                if isinstance(text.lookup, SuffixLookup):
                    text.lookup.forgotten |= text.lookup.tenant == tenant
            return self.history.erase(tenant)
