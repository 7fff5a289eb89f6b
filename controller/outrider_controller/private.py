"""Locks on directories, and scratch directories, of this user alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.user_cache import private_directory

_LOCK_NAME = "outrider.lock"
_ATTEMPTS = 20


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """A new directory in `root` for the block. Removes directories that killed processes left there.

    Raises OSError, for example when others may write into `root`.
    """
    directory, lock = _claim(root)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
        with suppress(OSError):
            root.rmdir()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks the directory for the block, against other callers of this function."""
    lock = _lock(directory, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def _claim(root: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that locks it until this process ends in any way."""
    for _ in range(_ATTEMPTS):
        # Another process may remove the root just before we enter it.
        with suppress(FileNotFoundError), locked(private_directory(root)):
            _sweep(root)
            directory = Path(tempfile.mkdtemp(dir=root, prefix=""))
            return directory, _lock(directory / _LOCK_NAME, os.O_CREAT | os.O_RDWR, fcntl.LOCK_EX)
    raise FileNotFoundError(f"{root}: is removed again and again")


def _sweep(root: Path) -> None:
    """Removes directories of processes that have ended, and nothing else that may be in `root`."""
    for directory in root.iterdir():
        with suppress(OSError):
            lock = _lock(directory / _LOCK_NAME, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(path: Path, flags: int, how: int) -> int:
    """A descriptor that holds the lock until it is closed. With LOCK_NB, raises BlockingIOError if it is taken."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
