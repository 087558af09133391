"""A certificate authority for development and tests: it signs certificates of processes, operators and tenants."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365
# Certificates are valid from a while ago, for clocks that differ.
_EARLIER = timedelta(minutes=5)


class DevelopmentCa:
    """An authority whose private key lies in memory, or in the file that `write` made."""

    def __init__(self, life: timedelta = timedelta(days=DAYS)) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Loraplex development CA")])
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
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
        certificate = (
            _builder(self._subject, self._subject, self._key.public_key(), life)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(Encoding.PEM)

    def issue(self, uri: str, hosts: Sequence[str] = (), life: timedelta = timedelta(days=DAYS)) -> tuple[bytes, bytes]:
        """Return a certificate and its private key, both PEM. `hosts` are the names and addresses that it serves."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = uri.rpartition("://")[2]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        names = [x509.UniformResourceIdentifier(uri), *map(_host, hosts)]
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        certificate = (
            _builder(subject, self._subject, key.public_key(), life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(Encoding.PEM), _pem(key)

    def write(self, directory: Path, name: str, pair: tuple[bytes, bytes]) -> tuple[Path, Path]:
        """Write a certificate and its key as NAME.pem and NAME-key.pem; the key is its owner's alone to read."""
        cert, key = directory / f"{name}.pem", directory / f"{name}-key.pem"
        write_private(key, pair[1])
        _replace(cert, pair[0], 0o644)
        return cert, key

    def write_ca(self, directory: Path) -> Path:
        """Write the authority's certificate as ca.pem and its key as ca-key.pem; return the certificate's path."""
        write_private(directory / "ca-key.pem", _pem(self._key))
        _replace(directory / "ca.pem", self.pem, 0o644)
        return directory / "ca.pem"


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, at once as a whole."""
    _replace(path, content, 0o600)


def _replace(path: Path, content: bytes, mode: int) -> None:
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    part.replace(path)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + life) - _EARLIER)
        .not_valid_after(now + life)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
