"""Whose fault it is when every sequence of a step fails: theirs, or the engine's."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine import DeviceLost, OutOfBlocks


class WholeStepFailed(Exception):
    """Every sequence of a step failed, and none is to blame: the engine fails whatever it is given. They are still
    open, for the next step or another worker."""


def check_engine(check: Callable[[], None]) -> None:
    """After a step in which every sequence failed. `check` runs a token of the engine's own.

    Raises WholeStepFailed, or DeviceLost.
    """
    try:
        check()
    except OutOfBlocks:
        # There is no room to find out.
        return
    except DeviceLost:
        raise
    except Exception as error:
        raise WholeStepFailed("the engine fails whatever it is given") from error
