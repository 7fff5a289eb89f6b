"""The ops port of a process: liveness, readiness, metrics and configuration over plain HTTP.

For operators' tools, never for clients. By default it listens on the loopback interface. It has its own threads, so
that /livez can answer and report when the event loop or a step hangs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from socketserver import TCPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from outrider.address import is_ip, is_loopback, split_address
from outrider.configuration import shown
from outrider.masking import masked
from outrider.telemetry.vllm_names import VllmNames

log = logging.getLogger(__name__)

ANY_LOOPBACK_PORT = "127.0.0.1:0"
_LOOP_TIMEOUT_S, _BEAT_S = 10.0, 0.5
_CLIENT_TIMEOUT_S = 5.0
AUTHORIZATION = "authorization"
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_PROBED = ("/livez", "/readyz", "/metrics", "/metrics/vllm")
_PATHS = (*_PROBED, "/configz")

Check = Callable[[], str]
"""Returns the problem in one line; empty without one. Called on an ops thread; must not block."""


@dataclass(frozen=True, slots=True)
class Page:
    status: HTTPStatus
    content_type: str
    body: bytes


PageMaker = Callable[[Mapping[str, str]], Page]
"""Makes a page from the query of the URL, where `authorization` is the header of that name. Called on an ops thread;
may be slow, but must end."""


@dataclass(slots=True)
class Ops:
    """The state that one process shows. Checks may be added at any time, from any thread."""

    component: str
    config: Any
    """The process's configuration: a dataclass."""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    live: dict[str, Check] = field(default_factory=dict)
    """Checks by name. A process that fails one should be restarted."""
    ready: dict[str, Check] = field(default_factory=dict)
    """Checks by name. A process that fails one should get no work for now."""
    notes: dict[str, str] = field(default_factory=dict)
    """Remarks by topic that /readyz adds if the process is ready."""
    pages: dict[str, PageMaker] = field(default_factory=dict)
    """Further pages of this process, by path."""
    beaten_s: float = field(default_factory=time.monotonic)
    """Monotonic time at which the event loop last ran."""

    def __post_init__(self) -> None:
        # These would be a second, unused series for every counter.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        ProcessCollector(registry=self.registry)
        build = Gauge(
            "outrider_build_info",
            "Component, version and Python of the process; always 1.",
            ["component", "version", "python"],
            registry=self.registry,
        )
        build.labels(self.component, version("outrider"), platform.python_version()).set(1)

    def beat(self) -> float:
        return self.beaten_s

    def page(self, path: str, query: Mapping[str, str] = MappingProxyType({})) -> Page:
        """The answer to a GET of this path."""
        if path in self.pages:
            return self.pages[path](query)
        match path:
            case "/livez":
                return _verdict(self.live)
            case "/readyz":
                return _verdict({**self.live, **self.ready}, self.notes)
            case "/metrics":
                return Page(HTTPStatus.OK, _METRICS, generate_latest(self.registry))
            case "/metrics/vllm":
                return Page(HTTPStatus.OK, _METRICS, generate_latest(VllmNames(self.registry)))
            case "/configz":
                text = json.dumps(masked(shown(self.config)), indent=2)
                return Page(HTTPStatus.OK, "application/json", text.encode() + b"\n")
            case _:
                known = "".join(f"{one}\n" for one in (*_PATHS, *self.pages))
                return Page(HTTPStatus.OK if path == "/" else HTTPStatus.NOT_FOUND, _TEXT, known.encode())


def _verdict(checks: Mapping[str, Check], notes: Mapping[str, str] = MappingProxyType({})) -> Page:
    """200, "ok" and the notes, or 503 and a line for each check that fails."""
    found = [(name, check()) for name, check in list(checks.items())]
    failed = "".join(f"{name}: {problem}\n" for name, problem in found if problem)
    if failed:
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, failed.encode())
    notes_text = "".join(f"{name}: {note}\n" for name, note in list(notes.items()))
    return Page(HTTPStatus.OK, _TEXT, f"ok\n{notes_text}".encode())


def busy_check(
    since_s: Callable[[], float | None], limit_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
) -> Check:
    """Fails when work that began at `since_s` (None while there is none) lasts longer than `limit_s`."""

    def check() -> str:
        begun_s = since_s()
        lasts_s = clock() - begun_s if begun_s is not None else 0.0
        most_s = limit_s()
        return f"the one under way lasts {lasts_s:.1f} s, more than {most_s:g} s" if lasts_s > most_s else ""

    return check


@asynccontextmanager
async def serving_ops(ops: Ops, listen: str) -> AsyncIterator[str]:
    """Serves `ops` at HOST:PORT until the block is left, and yields the bound one; "" for an empty `listen`.

    From now on /livez also fails when the current event loop hangs. Raises OSError when the address cannot be bound.
    """
    if not listen:
        yield ""
        return
    ops.live["event loop"] = busy_check(ops.beat, lambda: _LOOP_TIMEOUT_S)
    server = OpsServer(ops, listen)
    thread = threading.Thread(target=server.serve_forever, name="ops", daemon=True)
    thread.start()
    task = asyncio.create_task(_beat(ops), name="ops beat")
    log.info("ops port: http://%s", server.bound)
    try:
        yield server.bound
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


async def _beat(ops: Ops) -> None:
    while True:
        ops.beaten_s = time.monotonic()
        await asyncio.sleep(_BEAT_S)


class OpsServer(ThreadingHTTPServer):
    """Bound at once; serves once `serve_forever` is called. Raises OSError."""

    daemon_threads = True
    # Closing does not wait for a client that is slow to read.
    block_on_close = False

    def __init__(self, ops: Ops, listen: str) -> None:
        try:
            host, port = split_address(listen, "ops_listen")
        except ValueError as error:
            raise OSError(str(error)) from None
        self.ops = ops
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise OSError(f"ops_listen: cannot listen on {listen}: {error.strerror}") from error
        self.bound = f"{listen.rpartition(':')[0]}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Skips HTTPServer's DNS lookup of its own name, which is not used."""
        TCPServer.server_bind(self)

    def shutdown(self) -> None:
        """Ends `serve_forever`, which by itself looks every half second whether it should."""
        with suppress(OSError):  # Where a listener cannot be shut down (macOS), that look is waited for.
            self.socket.shutdown(socket.SHUT_RDWR)
        super().shutdown()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that disconnect before or during their answer."""


def _may_ask(path: str, host: str, reached_at: str) -> bool:
    """Whether to answer a request with this Host header (protection against DNS rebinding).

    A website in an operator's browser can let its own name resolve to our address, and then read the answer. A name
    without a dot is never a website's. Prometheus may use any name, so probed paths allow all.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if not name or is_loopback(f"{name}:0"):
        return True
    if is_loopback(f"{reached_at}:0"):
        return False
    return path in _PROBED or "." not in name or is_ip(name)


class _Handler(BaseHTTPRequestHandler):
    server: OpsServer

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(_CLIENT_TIMEOUT_S)

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if _may_ask(asked.path, self.headers.get("Host", ""), self.connection.getsockname()[0]):
            query = dict(parse_qsl(asked.query)) | {AUTHORIZATION: self.headers.get(AUTHORIZATION, "")}
            page = self.server.ops.page(asked.path, query)
        else:
            page = Page(HTTPStatus.FORBIDDEN, _TEXT, b"Host: ask by an IP address, or as localhost\n")
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        # No content from other origins, and no foreign frames, because this port has no login.
        self.send_header("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page.body)

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "outrider"

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing, to avoid a line for every probe."""
