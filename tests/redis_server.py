"""A Redis like the one that `outrider up` runs, for benchmarks and tests."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from outrider.metadata.connection.embedded import ServerCommand
from outrider.runtime.spawn import bound_to_us

_STARTUP_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0


class EmbeddedServer:
    """A running server, for `with`. It ends with the block, and on Linux also when the thread that started it dies."""

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
                # Ctrl-C in the terminal must not reach the server: the workers need it while they drain.
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
