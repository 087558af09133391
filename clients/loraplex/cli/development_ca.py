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
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365
# Certificates are valid from a while ago, for clocks that differ.
_EARLIER = timedelta(minutes=5)


class DevelopmentCa:
    """An authority whose private key lies in memory, or in the file that `write_ca` made."""

    def __init__(self, life: timedelta = timedelta(days=DAYS)) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Loraplex development CA")])
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.life_end = datetime.now(UTC) + life
        # Its certificate, and those of the authorities before it that have not ended.
        self.pem = self._own_certificate(life)

    @classmethod
    def read(cls, directory: Path) -> DevelopmentCa:
        """Return the authority that `write_ca` wrote. Raises OSError, and ValueError for files that are not its."""
        authority = cls.__new__(cls)
        authority.pem = (directory / "ca.pem").read_bytes()
        certificate = x509.load_pem_x509_certificates(authority.pem)[0]
        key = load_pem_private_key((directory / "ca-key.pem").read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ValueError("ca-key.pem is not the key of ca.pem")
        authority._key, authority._subject = key, certificate.subject
        authority._identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        authority.life_end = certificate.not_valid_after_utc
        return authority

    def successor(self, life: timedelta) -> DevelopmentCa:
        """Return a new authority, whose `pem` has this one too for as long as it lasts."""
        successor = DevelopmentCa(life)
        for certificate in x509.load_pem_x509_certificates(self.pem):
            if certificate.not_valid_after_utc > datetime.now(UTC):
                successor.pem += certificate.public_bytes(Encoding.PEM)
        return successor

    def _own_certificate(self, life: timedelta) -> bytes:
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
        return certificate.public_bytes(Encoding.PEM)

    def issue(self, uri: str, hosts: Sequence[str] = (), life: timedelta = timedelta(days=DAYS)) -> tuple[bytes, bytes]:
        """Return a certificate and its private key, both PEM. `hosts` are the names and addresses that it serves.

        It ends with the authority at the latest. Raises ValueError for an authority that has ended.
        """
        if (left := self.life_end - datetime.now(UTC)) <= timedelta(0):
            ended = f"the authority ended on {self.life_end:%Y-%m-%d}"
            raise ValueError(f"{ended}; `loraplex certs renew DIR --ca` makes another")
        key = ec.generate_private_key(ec.SECP256R1())
        name = uri.rpartition("://")[2]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        names = [x509.UniformResourceIdentifier(uri), *map(_host, hosts)]
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        certificate = (
            _builder(subject, self._subject, key.public_key(), min(life, left))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(Encoding.PEM), _pem(key)

    def ends(self, directory: Path) -> dict[str, datetime]:
        """Return the ends of the authority itself and of its certificates in a directory, by name as `write` has it.

        Raises OSError, and ValueError for a file that is no certificate.
        """
        ends = {"ca": self.life_end}
        for key in sorted(directory.glob("*-key.pem")):
            path = directory / f"{key.name.removesuffix('-key.pem')}.pem"
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            if path.name != "ca.pem" and certificate.issuer == self._subject:
                ends[path.stem] = certificate.not_valid_after_utc
        return ends

    def renew(self, directory: Path, name: str, life: timedelta) -> datetime:
        """Issue a certificate anew, for the same names with another key; return its end. Raises as `ends`."""
        certificate = x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        addresses = map(str, names.get_values_for_type(x509.IPAddress))
        pair = self.issue(uri, [*names.get_values_for_type(x509.DNSName), *addresses], life)
        self.write(directory, name, pair)
        return x509.load_pem_x509_certificate(pair[0]).not_valid_after_utc

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
