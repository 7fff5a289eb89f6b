"""Sends each alert to a URL, signed as in standardwebhooks.com. Nothing waits for it or fails with it.

The receiver compares `webhook-signature` with HMAC-SHA256 of "ID.TIMESTAMP.BODY" under the shared secret, and refuses
an old `webhook-timestamp`. A message may arrive twice, with the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, NoReturn
from urllib.parse import urlsplit

from outrider.configuration import Option

log = logging.getLogger(__name__)

_MAX_WAITING = 256
_ATTEMPTS = 3
_FIRST_PAUSE_S = 1.0
_TIMEOUT_S = 5.0
_MIN_SECRET_BYTES = 16
_PREFIX = b"whsec_"

Count = Callable[[str], None]
"""Called with the result of each message: delivered, failed or dropped."""


def read_secret(path: str | Path) -> bytes:
    """The secret in a file: any bytes, or whsec_ and base64. Raises OSError, ValueError."""
    content = Path(path).read_bytes().strip()
    if not content.startswith(_PREFIX):
        return content
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError(f"alert_webhook_secret_file: {path}: no base64 after whsec_") from None


@dataclass(frozen=True, slots=True, repr=False)
class WebhookConfig:
    url: Annotated[str, Option("webhook", secret=True)] = ""
    """URL that alerts are sent to, http or https; it may hold a credential. Empty: none."""
    secret: Annotated[bytes, Option("webhook_secret_file", read=read_secret, secret=True)] = b""
    """File with the secret that signs those messages: any bytes, or `whsec_` and base64. Empty: they are not signed."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if self.url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("alert_webhook: expected http://HOST… or https://HOST…")
        if self.secret and len(self.secret) < _MIN_SECRET_BYTES:
            raise ValueError(f"alert_webhook_secret_file: less than {_MIN_SECRET_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Message:
    id: str
    body: bytes

    @classmethod
    def of(cls, kind: str, data: Mapping[str, str], unix_s: float) -> Message:
        at = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        body = {"type": kind, "timestamp": at, "data": dict(data)}
        return cls(f"msg_{secrets.token_hex(12)}", json.dumps(body, ensure_ascii=False).encode())


def headers_of(message: Message, secret: bytes, unix_s: int) -> dict[str, str]:
    headers = {
        "content-type": "application/json",
        "user-agent": "outrider",
        "webhook-id": message.id,
        "webhook-timestamp": str(unix_s),
    }
    if secret:
        signed = f"{message.id}.{unix_s}.".encode() + message.body
        digest = hmac.digest(secret, signed, hashlib.sha256)
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


class Webhook:
    """Owned by one event loop. Messages are sent while `run` runs."""

    def __init__(self, config: WebhookConfig, count: Count, pause_s: float = _FIRST_PAUSE_S) -> None:
        self._config = config
        self._count = count
        self._pause_s = pause_s
        self._waiting: asyncio.Queue[Message] = asyncio.Queue(_MAX_WAITING)

    def send(self, kind: str, data: Mapping[str, str]) -> None:
        """Never waits. When too many messages wait already, this one is dropped and counted."""
        try:
            self._waiting.put_nowait(Message.of(kind, data, time.time()))
        except asyncio.QueueFull:
            self._count("dropped")

    async def run(self) -> NoReturn:
        while True:
            message = await self._waiting.get()
            self._count("delivered" if await self._deliver(message) else "failed")

    async def _deliver(self, message: Message) -> bool:
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._pause_s * 4 ** (attempt - 1))
            problem = await asyncio.to_thread(_post, self._config, message)
            if not problem:
                return True
        log.warning("alerts do not reach %s: %s", urlsplit(self._config.url).hostname, problem)
        return False


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the operator did not name that address."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _post(config: WebhookConfig, message: Message) -> str:
    """Sends a message and returns the error, or "". Blocks."""
    headers = headers_of(message, config.secret, int(time.time()))
    request = urllib.request.Request(config.url, message.body, headers, method="POST")
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"status {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        # Only its type: its text may contain the URL, and so a credential.
        return type(error).__name__
