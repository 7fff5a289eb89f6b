"""Samples of requests on an operator's volume, of tenants that have consented: a directory of each tenant, and in it a
file of each request. Nothing of them is written elsewhere, so removing the directory erases them.

An erasure is an order that stands on the volume. Whoever writes or reads there obeys it, and a lock decides which of
the two came first.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, Protocol
from urllib.parse import quote, unquote

MAX_BYTES = 256 << 20
MAX_DAYS = 30.0
_DAY_S = 86_400.0
_PRUNE_EVERY_S = 60.0
_ERASED = "erased-"
# Of a record while it is written.
_NEW = "new-"
_ORDERS = ".orders"
"""Directory of the volume's id, its lock, and an empty file for each order, named by tenant and time."""
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
    clock: Callable[[], float] = time.monotonic
    _seen_s: tuple[float, float] | None = None
    """What both clocks said when the volume was looked at."""
    _unseen_bytes: int = 0
    """Written since the volume was looked at."""
    _pruned_s: float = 0.0

    def of(self, tenant: str) -> Path:
        """The tenant's directory. A name may be `..`, so that it is not the whole name of it."""
        return self.directory / f"tenant-{quote(tenant, safe='')}"

    def write(self, tenant: str, acceptance: float, record: Mapping[str, Any], consent_us: int = 0) -> None:
        """Unless the tenant's samples were ordered to be erased after `consent_us`, the metadata store's time when the
        tenant's consent was read. Raises OSError.
        """
        self.write_parts(tenant, acceptance, [json.dumps(record, separators=(",", ":")).encode()], consent_us)

    def write_parts(self, tenant: str, acceptance: float, record: Iterable[bytes], consent_us: int = 0) -> None:
        """As `write`, of a record whose JSON comes in parts. Each is encrypted by itself, on a line of its own."""
        data = b"\n".join(map(self.cipher.encrypt, record)) if self.cipher is not None else b"".join(record)
        # In the order of names, the lowest acceptance comes first.
        name = f"{round(1000 * acceptance):04d}-{consent_us}-{token_hex(8)}"
        with self._locked("lock", fcntl.LOCK_SH):
            if consent_us < self.erased_us(tenant):
                return
            place = self.of(tenant)
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Renamed last: who reads meanwhile finds whole records only.
            new = place / f"{_NEW}{name}"
            try:
                with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(data)
                new.rename(place / name)
            except OSError:
                new.unlink(missing_ok=True)
                raise
        self._unseen_bytes += len(data)
        if self._unseen_bytes > self.max_bytes // _SLACK or abs(self.wall_clock() - self._pruned_s) > _PRUNE_EVERY_S:
            self.prune()

    def read(self, tenant: str) -> Iterator[dict[str, Any]]:
        """The tenant's records, the lowest acceptance first. Raises ValueError for a file that cannot be read."""
        for path in self._records(tenant):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                # Another process has removed it meanwhile: it was too old, or is erased.
                continue
            try:
                found: dict[str, Any] = json.loads(
                    data if self.cipher is None else b"".join(map(self.cipher.decrypt, data.split(b"\n")))
                )
            # Fernet's InvalidToken is no ValueError.
            except Exception as error:
                raise ValueError(f"{path}: cannot be read; is it encrypted with another key?") from error
            yield found

    def count(self, tenant: str) -> int:
        return len(self._records(tenant))

    def _records(self, tenant: str) -> list[Path]:
        erased_us = self.erased_us(tenant)
        return [path for path in sorted(self.of(tenant).glob("[0-9]*-*")) if _consent_us(path.name) >= erased_us]

    def work(self, tenant: str, name: str) -> Path:
        """A directory beside the tenant's records for what is made of them, erased by orders after those of now."""
        at_us = self.erased_us(tenant)
        return self.of(tenant) / (f"{name}@{at_us}" if at_us else name)

    def volume_id(self) -> str:
        """Made when it is first asked for. Raises OSError."""
        with self._locked("id", fcntl.LOCK_EX) as file:
            file.seek(0)
            if not (found := file.read().decode()):
                found = f"volume-{token_hex(8)}"
                file.write(found.encode())
            return found

    def erased_us(self, tenant: str) -> int:
        """The time of the last order to erase the tenant's samples that is known here; 0: none."""
        return max((at_us for name, at_us in self.orders() if name == tenant), default=0)

    def orders(self) -> list[tuple[str, int]]:
        """Tenant and time of each."""
        names = [path.name.rpartition("@") for path in (self.directory / _ORDERS).glob("*@*")]
        return [(unquote(tenant), int(at_us)) for tenant, _, at_us in names]

    @contextmanager
    def reading(self, tenant: str) -> Iterator[None]:
        """For whoever keeps what it reads: no erasure of the tenant's samples is complete within the block."""
        with self._locked(_readers(tenant), fcntl.LOCK_SH):
            yield

    def held(self, tenant: str) -> bool:
        """Whether somebody keeps samples of the tenant."""
        try:
            with self._locked(_readers(tenant), fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
        except BlockingIOError:
            return True

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[IO[bytes]]:
        """The lock of a process that ends is free. Raises OSError where the volume has no locks."""
        place = self.directory / _ORDERS
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(place / name, "a+b") as file:
            (place / name).chmod(0o600)
            fcntl.flock(file, how)
            yield file

    def erase(self, tenant: str, ordered_us: int = 0) -> int:
        """All of the tenant that is from before the order, with what `outrider distill` keeps there. Returns the number
        of records. `ordered_us` 0: all that is there now, and no order stands. Raises OSError.
        """
        place, count = self.of(tenant), 0
        if ordered_us:
            # Before the lock is free, so that nobody who reads or writes later misses it.
            with self._locked(f"{quote(tenant, safe='')}@{ordered_us}", fcntl.LOCK_SH):
                pass
        with self._locked("lock", fcntl.LOCK_EX):
            for path in place.glob("*"):
                if ordered_us and _consent_us(path.name) >= ordered_us:
                    continue
                count += path.name[:1].isdigit()
                # Renamed first: a directory is erased as a whole, whoever writes into it.
                path.rename(self.directory / f"{_ERASED}{token_hex(8)}")
            with suppress(OSError):
                # Unless there is something later.
                place.rmdir()
            for path in (self.directory / _ORDERS).glob(f"{quote(tenant, safe='')}@*"):
                if int(path.name.rpartition("@")[2]) < ordered_us:
                    path.unlink(missing_ok=True)
        self._remove_erased()
        return count

    def _remove_erased(self) -> None:
        """Those that a process left as it ended, too."""
        for place in self.directory.glob(f"{_ERASED}*"):
            if place.is_dir():
                shutil.rmtree(place, onerror=_unless_gone)
            else:
                place.unlink(missing_ok=True)

    def prune(self) -> None:
        """Removes what is too old. If the rest is too much, the highest acceptance goes first."""
        self._unseen_bytes, self._pruned_s = 0, self.wall_clock()
        now_s = self._believed_s()
        self._remove_erased()
        left, total = [], 0
        # Those that a process left half written, too.
        for path in (*self.directory.glob("tenant-*/[0-9]*-*"), *self.directory.glob(f"tenant-*/{_NEW}*")):
            with suppress(FileNotFoundError):
                found = path.stat()
                if now_s - found.st_mtime > self.max_days * _DAY_S:
                    path.unlink()
                    continue
                left.append((path.name, path, found.st_size))
                total += found.st_size
        for _, path, size in sorted(left, reverse=True):
            if total <= self.max_bytes - self.max_bytes // _SLACK:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _believed_s(self) -> float:
        """The time by which records are too old. A wall clock that has jumped by more than a day since the volume was
        looked at is trusted once it has gone on from there for a day; until then it is the time of that look."""
        wall_s, running_s = self.wall_clock(), self.clock()
        jumped = self._seen_s and abs((wall_s - self._seen_s[0]) - (running_s - self._seen_s[1])) > _DAY_S
        self._seen_s = wall_s, running_s
        with self._locked("looked", fcntl.LOCK_EX) as file:
            file.seek(0)
            # The second of them only in doubt: since when. Kept there, as a process may end before a day is over.
            looked_s, doubted_s, *_ = (*map(float, file.read().split()), wall_s, wall_s)
            if jumped or wall_s < doubted_s:
                doubted_s = wall_s
            trusted = abs(wall_s - looked_s) <= _DAY_S or wall_s - doubted_s >= _DAY_S
            file.truncate(0)
            file.write(b"%d" % wall_s if trusted else b"%d %d" % (looked_s, doubted_s))
        return wall_s if trusted else looked_s


def _unless_gone(function: object, path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
    """Another process removes the same files."""
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def _consent_us(name: str) -> int:
    """The time in a record's name, or in that of a directory that `work` has named. 0 in those of older releases."""
    _, _, at_us = name.rpartition("@")
    if name != at_us:
        return int(at_us) if at_us.isdigit() else 0
    parts = name.removeprefix(_NEW).split("-")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else 0


def _readers(tenant: str) -> str:
    return f"{quote(tenant, safe='')}.readers"
