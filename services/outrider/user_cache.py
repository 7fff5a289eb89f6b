"""Where the engine keeps what it would have to make again: models, compiled kernels, hashes of files. And where a stack
on this machine keeps what cannot be made again.

Compiled kernels are run and hashes are believed, so nobody but the user may have put them there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path


def cache_directory() -> Path:
    """OUTRIDER_CACHE, or ~/.cache/outrider. Raises FileNotFoundError where there is no home."""
    if chosen := os.environ.get("OUTRIDER_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "outrider"
    except RuntimeError as error:
        raise FileNotFoundError("no home directory is known: set OUTRIDER_CACHE") from error


def state_directory() -> Path:
    """OUTRIDER_STATE, or outrider in XDG_STATE_HOME, or ~/.local/state/outrider. Raises FileNotFoundError where there
    is no home."""
    if chosen := os.environ.get("OUTRIDER_STATE"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "outrider"
    except RuntimeError as error:
        raise FileNotFoundError("no home directory is known: set OUTRIDER_STATE") from error


def private_directory(path: Path) -> Path:
    """Makes it, or sees to it that nobody but this user can have put anything there. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private(path, stat.S_ISDIR)
    path.chmod(0o700)
    return path


def check_private(path: Path, is_kind: Callable[[int], bool], owners: Collection[int] = ()) -> None:
    """Refuses what another user owns or can write, and symbolic links. `owners` stand for this user, if given. Raises
    PermissionError."""
    found = path.lstat()
    if not is_kind(found.st_mode):
        raise PermissionError(f"{path}: a link, or not what belongs there")
    if found.st_uid not in (owners or (os.geteuid(),)):
        raise PermissionError(f"{path}: owned by user {found.st_uid}, not by this one")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path}: others may write to it; remove it, or set OUTRIDER_CACHE")
