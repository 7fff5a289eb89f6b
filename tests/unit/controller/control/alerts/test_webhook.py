"""Alerts reach a URL, signed, and a URL that does not answer costs nobody anything."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from outrider.metadata.event_writer import EventWriter
from outrider.runtime.supervision import background
from outrider_controller.control.alerts.active import Alert, AlertKind, Change
from outrider_controller.control.alerts.report import AlertReport
from outrider_controller.control.alerts.webhook import Webhook, WebhookConfig, read_secret

from tests.unit.metadata.test_event_writer import Stream

SECRET = b"0123456789abcdef"


class Receiver(HTTPServer):
    """Answers with the statuses given, then with 204."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = list(statuses)
        self.received: list[tuple[dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?token=hidden"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 204)
        self.send_header("location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


async def until(counted: Counter[str], **expected: int) -> None:
    async with asyncio.timeout(60):
        while counted != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def change(*, raised: bool = True) -> Change:
    return Change(Alert(AlertKind.OUTPUT_LOOPS, "m", "acme"), raised, "0.99 of the last 1000")


async def test_an_alert_arrives_signed_so_that_the_receiver_knows_whose_it_is(receiver: Receiver) -> None:
    counted, stream = Counter[str](), Stream()
    stream.open.set()
    webhook = Webhook(WebhookConfig(receiver.url, SECRET), lambda result: counted.update([result]))
    async with background(webhook.run(), "webhook"):
        async with EventWriter(stream).running() as events:
            AlertReport(events, webhook)([change(), change(raised=False)])
        await until(counted, delivered=2)
    data = {"alert": "output_loops", "tenant": "acme", "model": "m", "reason": "0.99 of the last 1000"}
    assert stream.taken == [("alert_raised", data), ("alert_cleared", data)]
    (headers, body), (_, second) = receiver.received
    said = json.loads(body)
    assert (said["type"], said["data"], json.loads(second)["type"]) == ("alert.raised", data, "alert.cleared")
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


async def test_a_receiver_that_fails_is_asked_again_and_a_redirect_is_not_followed(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counter[str]()
    receiver.statuses = [503, 200, 302, 302, 302]
    config = WebhookConfig(receiver.url)
    with caplog.at_level(logging.WARNING):
        webhook = Webhook(config, lambda result: counted.update([result]), pause_s=0.01)
        async with background(webhook.run(), "webhook"):
            webhook.send("alert.raised", {})
            await until(counted, delivered=1)
            webhook.send("alert.raised", {})
            await until(counted, delivered=1, failed=1)
    assert len(receiver.received) == 5
    first, again = receiver.received[0][0], receiver.received[1][0]
    assert first["webhook-id"] == again["webhook-id"] and "webhook-signature" not in first
    assert "status 302" in caplog.text and "hidden" not in caplog.text


async def test_a_receiver_that_hangs_costs_messages_and_no_caller() -> None:
    counted = Counter[str]()
    webhook = Webhook(WebhookConfig("http://127.0.0.1:9"), lambda result: counted.update([result]))
    async with background(webhook.run(), "webhook"):
        for _ in range(300):
            webhook.send("alert.raised", {})
        assert counted == {"dropped": 300 - 256}


@pytest.mark.parametrize(
    ("url", "secret", "field"),
    [("ftp://host/x", b"", "alert_webhook"), ("https://", b"", "alert_webhook"), ("http://h", b"x", "secret_file")],
)
def test_what_makes_no_sense_is_refused_by_option(url: str, secret: bytes, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        WebhookConfig(url, secret)


def test_a_secret_may_be_plain_or_as_webhook_services_give_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for content, expected in ((SECRET + b"\n", SECRET), (b"whsec_" + base64.b64encode(SECRET), SECRET)):
        file.write_bytes(content)
        assert read_secret(file) == expected
    file.write_bytes(b"whsec_!")
    with pytest.raises(ValueError, match="base64"):
        read_secret(file)
