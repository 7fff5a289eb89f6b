"""What the draft worker's tests share."""

from __future__ import annotations

import pytest
from outrider.draft.worker import DraftWorker
from outrider.drafters import NgramDrafter
from outrider.drafting.lookup.ngram import NgramConfig


@pytest.fixture
def worker() -> DraftWorker:
    """Of n-grams, four sequences at most: its proposals can be told in advance."""
    return DraftWorker(NgramDrafter(384, 512, NgramConfig()), max_sequences=4)
