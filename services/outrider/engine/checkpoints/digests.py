"""Hashes of file contents, each computed once: reading the weights of a large model twice would cost minutes.

A file counts as unchanged while its path, size, modification time and inode are equal. The hashes are kept in the
user's cache, where no other user may write: a forged hash would pass one set of weights off as another.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from outrider.user_cache import cache_directory, private_directory, write_whole

log = logging.getLogger(__name__)

_SMALL = 1 << 20
"""In bytes. Hashing a smaller file is as fast as looking up its hash."""


def file_digest(file: Path) -> bytes:
    """Its SHA-256."""
    status = file.stat()
    if status.st_size < _SMALL:
        return _read(file)
    identity = [str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    try:
        directory = private_directory(cache_directory() / "digests")
    except OSError as error:
        log.warning("%s is hashed at every start: %s", file.name, error)
        return _read(file)
    if (known := _known(directory / name)) is not None:
        return known
    digest = _read(file)
    try:
        write_whole(directory / name, digest.hex())
    except OSError as error:
        log.warning("%s is hashed at every start: %s", file.name, error)
    return digest


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _known(entry: Path) -> bytes | None:
    try:
        found = bytes.fromhex(entry.read_text())
    except (OSError, ValueError):
        return None
    return found if len(found) == hashlib.sha256().digest_size else None
