"""Drafts that are looked up in text: they need tokens only, no model and no round trip.

`source` has what all lookups share; a new kind is one file like `prediction`, imported here, where it registers itself.
"""

from outrider.drafting.lookup import ngram, prediction
from outrider.drafting.lookup.source import Lookup, LookupDrafts

NAMES = (ngram.NAME, prediction.NAME)
"""The kinds of this package, as make_sources takes them."""

__all__ = ["NAMES", "Lookup", "LookupDrafts"]
