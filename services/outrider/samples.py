"""Samples of requests on an operator's volume, of tenants that have consented: a directory of each tenant, and in it a
file of each request. Nothing of them is written elsewhere, so removing the directory erases them.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol
from urllib.parse import quote

MAX_BYTES = 256 << 20
MAX_DAYS = 30.0
_DAY_S = 86_400.0
_PRUNE_EVERY_S = 60.0
_ERASED = "erased-"
# Of a record while it is written.
_NEW = "new-"
_SLACK = 16
"""One part in so many of the bound may be written before the volume is looked at again."""


class Cipher(Protocol):
    def encrypt(self, data: bytes) -> bytes: ...

    def decrypt(self, token: bytes) -> bytes: ...


def read_cipher(path: str | Path) -> Cipher:
    """Of a file with a Fernet key: 32 bytes in URL-safe base64. Raises OSError, or ValueError for another content."""
    from cryptography.fernet import Fernet

    try:
        cipher: Cipher = Fernet(Path(path).read_bytes().strip())
        return cipher
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@dataclass(slots=True)
class SampleStore:
    """Owned by one thread. Several processes may share the directory."""

    directory: Path
    cipher: Cipher | None = None
    max_bytes: int = MAX_BYTES
    max_days: float = MAX_DAYS
    wall_clock: Callable[[], float] = time.time
    _unseen_bytes: int = 0
    """Written since the volume was looked at."""
    _pruned_s: float = 0.0

    def of(self, tenant: str) -> Path:
        """The tenant's directory. A name may be `..`, so that it is not the whole name of it."""
        return self.directory / f"tenant-{quote(tenant, safe='')}"

    def write(self, tenant: str, acceptance: float, record: Mapping[str, Any]) -> None:
        """Raises OSError."""
        data = json.dumps(record, separators=(",", ":")).encode()
        if self.cipher is not None:
            data = self.cipher.encrypt(data)
        place = self.of(tenant)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        # In the order of names, the lowest acceptance comes first.
        path = place / f"{round(1000 * acceptance):04d}-{token_hex(8)}"
        # Renamed last: who reads meanwhile finds whole records only.
        new = place / f"{_NEW}{token_hex(8)}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        new.rename(path)
        self._unseen_bytes += len(data)
        if self._unseen_bytes > self.max_bytes // _SLACK or self.wall_clock() - self._pruned_s > _PRUNE_EVERY_S:
            self.prune()

    def read(self, tenant: str) -> Iterator[dict[str, Any]]:
        """The tenant's records, the lowest acceptance first. Raises ValueError for a file that cannot be read."""
        for path in sorted(self.of(tenant).glob("[0-9]*-*")):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                # Another process has removed it meanwhile: it was too old, or is erased.
                continue
            try:
                found: dict[str, Any] = json.loads(data if self.cipher is None else self.cipher.decrypt(data))
            # Fernet's InvalidToken is no ValueError.
            except Exception as error:
                raise ValueError(f"{path}: cannot be read; is it encrypted with another key?") from error
            yield found

    def count(self, tenant: str) -> int:
        return len(list(self.of(tenant).glob("[0-9]*-*")))

    def erase(self, tenant: str) -> int:
        """All of the tenant, with what `outrider distill` keeps there. Returns the number of records."""
        # Renamed first, so that one of several processes erases it, and none writes into it meanwhile.
        place = self.of(tenant)
        count = self.count(tenant)
        try:
            place.rename(self.directory / f"{_ERASED}{token_hex(8)}")
        except FileNotFoundError:
            count = 0
        self._remove_erased()
        return count

    def _remove_erased(self) -> None:
        """Those that a process left as it ended, too."""
        for place in self.directory.glob(f"{_ERASED}*"):
            shutil.rmtree(place, onerror=_unless_gone)

    def prune(self) -> None:
        """Removes what is too old. If the rest is too much, the highest acceptance goes first."""
        self._unseen_bytes, self._pruned_s = 0, self.wall_clock()
        self._remove_erased()
        left, total = [], 0
        # Those that a process left half written, too.
        for path in (*self.directory.glob("tenant-*/[0-9]*-*"), *self.directory.glob(f"tenant-*/{_NEW}*")):
            with suppress(FileNotFoundError):
                found = path.stat()
                if self._pruned_s - found.st_mtime > self.max_days * _DAY_S:
                    path.unlink()
                    continue
                left.append((path.name, path, found.st_size))
                total += found.st_size
        for _, path, size in sorted(left, reverse=True):
            if total <= self.max_bytes - self.max_bytes // _SLACK:
                return
            path.unlink(missing_ok=True)
            total -= size


def _unless_gone(function: object, path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
    """Another process removes the same files."""
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]
