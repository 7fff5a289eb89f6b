"""Python's collector of reference cycles in a process that serves: it stops everything, so it runs seldom."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Few cycles are made on the path of a token, and looking for them among thousands of running requests takes
# milliseconds: it is done as rarely as memory allows.
_THRESHOLDS = (20_000, 20, 50)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """What exists now outlives the block, so the collector of cycles does not go through it within: with all that is
    imported, once takes a tenth of a second."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        # Else what is freed as the interpreter ends would count as leaked.
        gc.unfreeze()
