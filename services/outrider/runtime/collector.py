"""Python's cyclic garbage collector in a serving process: it stops all threads, so it runs rarely."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# The token path makes few cycles, and a collection with thousands of running requests takes milliseconds. So it runs as
# rarely as memory allows.
_THRESHOLDS = (20_000, 20, 50)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Within the block the collector skips all objects that exist now, as they outlive the block. One pass over all
    imported modules takes a tenth of a second."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        # Otherwise objects freed at interpreter exit would count as leaked.
        gc.unfreeze()
