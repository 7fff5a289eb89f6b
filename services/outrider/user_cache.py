"""The engine's cache directory, for models, compiled kernels and hashes of files; the state directory, where a stack on
this machine keeps what cannot be made again; and directories and files of this user alone.

Compiled kernels are executed and hashes are trusted, so only the user may be able to write there.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path


def cache_directory() -> Path:
    """OUTRIDER_CACHE, or ~/.cache/outrider. Raises FileNotFoundError when there is no home."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError as error:
        raise FileNotFoundError("no home directory is known: set OUTRIDER_CACHE") from error


def state_directory() -> Path:
    """OUTRIDER_STATE, or outrider in XDG_STATE_HOME, or ~/.local/state/outrider. Raises FileNotFoundError when there is
    no home."""
    if chosen := os.environ.get("OUTRIDER_STATE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "outrider"
    except RuntimeError as error:
        raise FileNotFoundError("no home directory is known: set OUTRIDER_STATE") from error


def private_directory(path: Path) -> Path:
    """Creates it, or checks that only this user could write there. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private(path, stat.S_ISDIR)
    return path


def write_whole(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replaces the file in one atomic step: a reader gets the old content or the new. No other user can read it before
    it has `mode`."""
    descriptor, written = tempfile.mkstemp(dir=path.parent)
    with open(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        os.fchmod(descriptor, mode)
    os.replace(written, path)


def check_private(path: Path, is_kind: Callable[[int], bool], owners: Collection[int] = ()) -> None:
    """Refuses symbolic links and files that another user owns or can write. `owners`: accepted instead of this user, if
    given. Raises PermissionError."""
    found = path.lstat()
    if not is_kind(found.st_mode):
        raise PermissionError(f"{path}: a link, or not what belongs there")
    if found.st_uid not in (owners or (os.geteuid(),)):
        raise PermissionError(f"{path}: owned by user {found.st_uid}, not by this one")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path}: others may write to it; make its mode 0700, or take another directory")
