"""What a client makes of a server that breaks off."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from threading import Thread

import pytest

from loadtest.settings import Tenant

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKEN = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'

Serve = Callable[[bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that answers one request with these bytes and closes. Returns its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threads: list[Thread] = []

        def answer(answered: bytes) -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answered)
                # The end comes as FIN, not as RST, which unread bytes would make of it.
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)

        def start(answered: bytes) -> str:
            threads.append(Thread(target=answer, args=(answered,)))
            threads[-1].start()
            return f"127.0.0.1:{listening.getsockname()[1]}"

        yield start
        for thread in threads:
            thread.join(timeout=60)


@pytest.fixture(scope="module")
def asking() -> Iterator[Executor]:
    """A process for gevent, whose event loop takes over signals and sockets of the process that it is in."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process


def _error(address: str) -> str:
    from loadtest.clients import HttpClient, ask

    client = HttpClient(address, "tiny")
    outcome = ask(client, Tenant("chat"), "Hello")
    client.close()
    return outcome.error


@pytest.mark.parametrize(
    ("answered", "error"),
    [
        (b"", "broken answer: HTTPConnectionClosed"),
        (_HEAD[:20], "broken answer: HTTPParseError"),
        (_HEAD, "broken answer: HTTPParseError"),
        (_HEAD + b"%x\r\n%b\r\n" % (len(_TOKEN), _TOKEN), "broken answer: HTTPParseError"),
        (_HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(_TOKEN), _TOKEN), "the stream ended without a finish"),
        (_HEAD + b"8\r\ndata: {\n\r\n0\r\n\r\n", "broken answer: JSONDecodeError"),
        (_HEAD + b"9\r\ndata: {}\n\r\n0\r\n\r\n", "broken answer: KeyError"),
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "HTTP 503"),
    ],
    ids=["nothing", "in the head", "after the head", "in the body", "no finish", "no JSON", "no choices", "503"],
)
def test_an_answer_that_breaks_off_is_a_failed_request(
    serve: Serve, asking: Executor, answered: bytes, error: str
) -> None:
    assert asking.submit(_error, serve(answered)).result() == error


def _without_text() -> tuple[float, float]:
    from loadtest.clients import Piece, ask

    class Terse:
        def pieces(self, tenant: Tenant, prompt: str) -> Iterator[Piece]:
            time.sleep(0.01)
            yield Piece(has_tokens=False, counts={"completion_tokens": 1})

        def close(self) -> None: ...

    outcome = ask(Terse(), Tenant("chat"), "Hello")
    return outcome.ttft_ms, outcome.e2e_ms


def test_an_answer_without_text_takes_the_time_until_its_end(asking: Executor) -> None:
    ttft_ms, e2e_ms = asking.submit(_without_text).result(timeout=60)
    assert ttft_ms == e2e_ms >= 10
