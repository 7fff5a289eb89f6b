"""What fails for one tenant or worker is left out of the plan, and the others are planned as ever."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def leaving_out(whose: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.error("the plan leaves out %s", whose, exc_info=error)
