"""What the draft worker's tests share."""

from __future__ import annotations

import pytest
from outrider.draft.worker import DraftWorker

from tests.ngram_drafter import NgramDrafter


@pytest.fixture
def worker() -> DraftWorker:
    """Of n-grams, four sequences at most: its proposals can be told in advance."""
    return DraftWorker(NgramDrafter(), max_sequences=4)
