"""A certificate authority in a directory, for a cluster without a company's own authority.

Leaf certificates serve for both ends of a connection, and contain the given names, such as `target.outrider`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from outrider.user_cache import write_whole

_AUTHORITY_LIFE = timedelta(days=3650)
# Clocks of different machines may differ by this much.
_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes

    def write(self, directory: Path, authority: bytes) -> None:
        """Writes `tls.crt`, `tls.key` and `ca.crt`, each in one atomic step; only this user may read the key."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(directory / "ca.crt", authority, 0o644)
        write_whole(directory / "tls.key", self.key, 0o600)
        write_whole(directory / "tls.crt", self.certificate, 0o644)


class Authority:
    """Signs certificates. Its key is the cluster's root of trust."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def new(cls, name: str = "Outrider cluster") -> Authority:
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        builder = _builder(name, name, key, now, now + _AUTHORITY_LIFE)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True).add_extension(identifier, critical=False)
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def open(cls, directory: Path) -> Authority:
        """The authority in `directory`; makes and writes a new one if there is none. Raises OSError, ValueError."""
        certificate, key = directory / "ca.crt", directory / "ca.key"
        if not key.exists():
            authority = cls.new()
            authority.write(directory)
            return authority
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key}: is not an elliptic-curve key")
        return cls(loaded, x509.load_pem_x509_certificate(certificate.read_bytes()))

    def write(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(directory / "ca.key", _pem(self._key), 0o600)
        write_whole(directory / "ca.crt", self.pem, 0o644)

    @property
    def pem(self) -> bytes:
        """Its certificate, which others trust."""
        pem: bytes = self._certificate.public_bytes(serialization.Encoding.PEM)
        return pem

    def issue(self, names: Sequence[str], life: timedelta, now: datetime | None = None) -> Issued:
        """A certificate for these DNS names and IP addresses, valid from now on for `life`."""
        now = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(names[0], self._common_name, key, now, now + life)
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage(uses), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), False),
            (x509.SubjectAlternativeName([_general_name(name) for name in names]), False),
        ):
            builder = builder.add_extension(extension, critical)
        signed = builder.sign(self._key, hashes.SHA256())
        return Issued(signed.public_bytes(serialization.Encoding.PEM), _pem(key))

    @property
    def _common_name(self) -> str:
        return str(self._certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, since: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(since, until) - _SKEW)
        .not_valid_after(until)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, form, plain)
    return pem
