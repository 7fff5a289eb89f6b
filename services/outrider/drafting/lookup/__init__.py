"""Drafts that are looked up in text: they need tokens only, no model and no round trip.

`source` has what all lookups share; a new kind is one file like `prediction`, imported here, where it registers itself.
Not here: drafts of models (`pool/`, `heads/`). Begin with `source`.
"""

from outrider.drafting.lookup import ngram, prediction, suffix
from outrider.drafting.lookup.source import Lookup, LookupDrafts

NAMES = (ngram.NAME, prediction.NAME)
"""The kinds that a target has by default, as make_sources takes them. Suffixes remember answers: an operator turns them
on."""

ALL_NAMES = (*NAMES, suffix.NAME)

__all__ = ["ALL_NAMES", "NAMES", "Lookup", "LookupDrafts"]
