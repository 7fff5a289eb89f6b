"""Receipts: what is in one, and its signature. A receipt is a JWS (RFC 7515) in Ed25519 (RFC 8037) around JSON.

Whoever has the receipt's prompt and a target of its revision can compute the answer again without drafts.
"""

from __future__ import annotations

import json
import struct
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf import json_format

from outrider.rpc.v1 import receipt_pb2, router_pb2

_PEM = serialization.Encoding.PEM


class BadReceipt(Exception):
    """The receipt is none, or its signature is not that of the key. The message says which."""


def digest(token_ids: Sequence[int]) -> str:
    """SHA-256, in hex, of the ids as little-endian 32-bit numbers."""
    return sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


def receipt_of(
    request: router_pb2.RouteRequest,
    stop: Sequence[str],
    revisions: Sequence[tuple[str, int]],
    draft_kinds: Iterable[str],
) -> receipt_pb2.Receipt:
    """`request`: the one that would continue the answer after its end, with all of its tokens. `revisions`: each with
    the number of output tokens before its first.
    """
    return receipt_pb2.Receipt(
        id=request.request_id,
        model=request.model,
        model_revisions=[revision for revision, _ in revisions],
        revision_starts=[start for _, start in revisions],
        prompt_sha256=digest(request.prompt_token_ids),
        prompt_tokens=len(request.prompt_token_ids),
        output_sha256=digest(request.resume_token_ids),
        output_tokens=len(request.resume_token_ids),
        # The answer may have ended before the last of those that came.
        resumed_tokens=min(request.num_resumed_by_client, len(request.resume_token_ids)),
        sampling=request.sampling,
        stopping=request.stopping,
        stop=stop,
        logits=request.logits if request.HasField("logits") else None,
        draft_kinds=sorted(draft_kinds),
        issued_unix_s=int(time.time()),
    )


@dataclass(frozen=True, slots=True)
class ReceiptKey:
    """The private key of a gateway, or of all gateways that share its file."""

    private: Ed25519PrivateKey

    @classmethod
    def make(cls) -> ReceiptKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path | str) -> ReceiptKey:
        """From a PEM file. Raises OSError; ValueError if it has no such key."""
        try:
            private = serialization.load_pem_private_key(Path(path).read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError(f"{path}: is not an Ed25519 key")
        return cls(private)

    @property
    def pem(self) -> bytes:
        """PKCS #8, as `openssl genpkey -algorithm ed25519` writes it."""
        form = serialization.PrivateFormat.PKCS8
        pem: bytes = self.private.private_bytes(_PEM, form, serialization.NoEncryption())
        return pem

    @property
    def public_pem(self) -> str:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        pem: bytes = self.private.public_key().public_bytes(_PEM, form)
        return pem.decode()

    def sign(self, receipt: receipt_pb2.Receipt) -> str:
        content = json_format.MessageToJson(receipt, indent=None, preserving_proto_field_name=True)
        signed = f"{_encoded(json.dumps({'alg': 'EdDSA'}).encode())}.{_encoded(content.encode())}"
        return f"{signed}.{_encoded(self.private.sign(signed.encode()))}"


def public_key(pem: bytes) -> Ed25519PublicKey:
    """Raises BadReceipt."""
    try:
        key = serialization.load_pem_public_key(pem)
    except ValueError as error:
        raise BadReceipt(f"the key cannot be read: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise BadReceipt("the key is not an Ed25519 one")
    return key


def checked(receipt: str, key: Ed25519PublicKey) -> receipt_pb2.Receipt:
    """The content of a receipt that this key has signed. Raises BadReceipt."""
    if receipt.count(".") != 2:
        raise BadReceipt("not a receipt: a receipt has three parts with dots between them")
    try:
        signed, _, signature = receipt.strip().rpartition(".")
        header, content = map(_decoded, signed.split("."))
        key.verify(_decoded(signature), signed.encode())
        if json.loads(header) != {"alg": "EdDSA"}:
            raise BadReceipt("the receipt has another header than receipts have")
        # A later release may add fields. They are signed too.
        return json_format.Parse(content, receipt_pb2.Receipt(), ignore_unknown_fields=True)
    except InvalidSignature:
        why = "the receipt was changed, or signed with another key"
        raise BadReceipt(f"the signature is not that of this key: {why}") from None
    except (ValueError, json_format.ParseError) as error:
        raise BadReceipt(f"not a receipt: {error}") from None


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
