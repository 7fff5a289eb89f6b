"""A machine whose environment names a proxy, as in many companies: nothing inside a cluster goes through it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from outrider.testing.tiny import tiny_checkpoint

_NAMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# Ray asks these once, to learn in whose cloud it is; it waits for no answer.
_CLOUDS = (b"169.254.169.254", b"metadata.google.internal")
_OUTRIDER = (sys.executable, "-m", "outrider_controller.cli")


class RefusingProxy:
    """Answers whatever asks it with 403, as a proxy does that does not know the host."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))

    @property
    def environment(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        clean = {
            name: value
            for name, value in os.environ.items()
            if "proxy" not in name.lower() and not name.startswith("OUTRIDER_")
        }
        return {**clean, **{spelt: url for name in _NAMES for spelt in (name, name.upper())}}

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(1000))
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")

    @contextmanager
    def running(self) -> Iterator[RefusingProxy]:
        threading.Thread(target=self._serve, daemon=True).start()
        try:
            yield self
        finally:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stack_behind_a_proxy_that_refuses_everything_serves_and_asks_it_nothing(tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "tiny", max_context_len=512))
    sizes = f"--dtype float32 --kv-cache-bytes {16 << 20}"
    asked = ["--target-model", model, "--draft-model", model, "--target-args", sizes, "--draft-args", sizes]
    ports = ["--http-port", "0", "--grpc-port", "0", "--control-port", "0", "--run-dir", str(tmp_path / "run")]
    with RefusingProxy().running() as proxy, (tmp_path / "up.log").open("w") as log:
        environment = {**proxy.environment, "XDG_STATE_HOME": str(tmp_path / "state")}
        up = subprocess.Popen(
            [*_OUTRIDER, "up", "-o", "json", "--context", "proxied", "--start-timeout", "120", *asked, *ports],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert up.stdout is not None
            assert up.stdout.readline(), (tmp_path / "up.log").read_text()
            for command in (["generate", "--max-tokens", "4", "abc"], ["get", "workers"], ["events"]):
                done = subprocess.run(
                    [*_OUTRIDER, *command, "--context", "proxied"], env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stderr
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(timeout=60)
    assert [asked for asked in proxy.asked if not any(host in asked for host in _CLOUDS)] == []
