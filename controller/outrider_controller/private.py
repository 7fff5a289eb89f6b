"""Directories and files of this user alone: other users can neither read them nor place a link there."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK_NAME = "outrider.lock"
_ATTEMPTS = 20


def make_private(directory: Path) -> Path:
    """Makes the directory with mode 0700 if needed. Raises PermissionError when others may write into it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{directory}: must be a directory that no other user may write into, as with mode 0700")
    return directory


def write_whole(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replaces the file in one atomic step: a reader gets the old content or the new. The new file has `mode` from its
    creation, so no other user can read it early."""
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.unlink(missing_ok=True)
    with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    written.replace(path)


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
        with suppress(FileNotFoundError), locked(make_private(root)):
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
