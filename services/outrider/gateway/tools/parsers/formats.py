"""The ways to write calls, by vLLM's names. Each module of calls registers those that it reads."""

from __future__ import annotations

from outrider.gateway.tools.parsers import json_calls, python_calls, tagged_calls
from outrider.gateway.tools.parsers.reasoning import CLOSE, OPEN
from outrider.gateway.tools.parsers.tool_calls import FORMATS as FORMATS

_MODULES = (json_calls, python_calls, tagged_calls)
MARKERS = tuple({mark: None for each in FORMATS.values() for mark in each.marks} | {OPEN: None, CLOSE: None})
"""Tokens that are part of the text here, even if a vocabulary has them as special tokens."""
