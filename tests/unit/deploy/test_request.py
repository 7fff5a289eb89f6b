"""What `helm test` runs, against a gateway of a few lines: it waits where it is too early, and says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.unit.deploy.chart import CHART


@contextmanager
def gateway(*early: int, key: str = "") -> Iterator[int]:
    """Its port. Its first answers have these codes; then it answers who has the key."""
    codes = list(early)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            self.rfile.read(length)
            code = codes.pop(0) if codes else 200
            if length and key and self.headers.get("authorization") != f"Bearer {key}":
                code = 401
            body = b"outrider_request_success_total 1"
            if length and code == 200:
                body = b'{"usage": {"completion_tokens": 8}, "choices": [{"message": {"content": "Blue."}}]}'
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            """Not into the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def run(port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    asked = {"SCHEME": "http", "GATEWAY": "127.0.0.1", "PORT": str(port), "MODEL": "m", "PAUSE": "0"}
    asked |= {"METRICS": f"http://127.0.0.1:{port}/metrics", "PATH": os.environ["PATH"], **environment}
    program = CHART / "tests/request.py"
    return subprocess.run([sys.executable, program], env=asked, capture_output=True, text=True, timeout=60)


def test_it_waits_for_models_that_are_still_being_loaded() -> None:
    with gateway(503, 503, 200, 404, 503) as port:
        done = run(port)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["healthy", "Blue.", "counted"]


def test_it_asks_with_a_key_and_says_where_one_is_missing() -> None:
    with gateway(key="sk-1") as port:
        assert run(port, API_KEY="sk-1").returncode == 0
        refused = run(port)
    assert refused.returncode != 0 and "tests.apiKeySecret" in refused.stderr


def test_it_ends_where_it_is_too_early_for_too_long() -> None:
    with gateway(*[503] * 1000) as port:
        done = run(port, SECONDS="0")
    assert done.returncode != 0 and "too early until the end" in done.stderr


def test_it_asks_the_gateway_without_the_proxy_in_its_environment() -> None:
    with gateway() as port:
        done = run(port, http_proxy="http://127.0.0.1:1", HTTP_PROXY="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr
