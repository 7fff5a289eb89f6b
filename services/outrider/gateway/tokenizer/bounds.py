"""The most bytes of a prompt that one token can stand for, to refuse long prompts before they are tokenised.

Pure: reads the parts of a tokenizer.json. If a tokenizer may drop or shorten text, there is no such number.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

# Factors by which a step may shrink a text in UTF-8. Normal forms: UAX 15, "Maximum Expansion Factors". SentencePiece
# writes a space as U+2581, three bytes; a U+2581 in the prompt counts as a space, one byte.
_SHRINKS = {"NFC": 3, "NFKC": 11, "Replace": 3, "Metaspace": 3}
_KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "NFC", "NFKC", "Prepend", "Punctuation", "Split"})


def max_bytes_per_token(spec: dict[str, Any], pieces: Collection[bytes]) -> int | None:
    """The most UTF-8 bytes of a text that become one token; None if unbounded.

    `spec` is tokenizer.json, `pieces` the text of every token in the vocabulary.
    """
    added = spec["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added) or not _covers_every_byte(spec, pieces):
        return None
    steps = [*_steps(spec["normalizer"]), *_steps(spec["pre_tokenizer"])]
    if not all(_keeps_text(step) for step in steps):
        return None
    longest = max(len(piece) for piece in [*pieces, *(token["content"].encode() for token in added)])
    return longest * math.prod(_SHRINKS.get(step["type"], 1) for step in steps)


def _covers_every_byte(spec: dict[str, Any], pieces: Collection[bytes]) -> bool:
    """If not, unknown characters are dropped, or any number of them becomes one unknown token."""
    return spec["model"]["type"] == "BPE" and len({piece for piece in pieces if len(piece) == 1}) == 256


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        inner = part.get("normalizers") or part.get("pretokenizers") or []
        return [step for one in inner for step in _steps(one)]
    return [part]


def _keeps_text(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(pattern.encode()) <= len(step["content"].encode())
    return step["type"] in _KEEPS_TEXT and step.get("behavior") != "Removed"
