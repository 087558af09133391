"""Credentials of a client: an API key or token, a certificate, and the authority that signs servers' certificates."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from loraplex_client.errors import InvalidRequestError

# A key or token itself, or a function that returns the current one before each call.
ApiKey: TypeAlias = str | Callable[[], str]

# The variables that a client without credentials of its own reads.
KEY_VARIABLE, KEY_FILE_VARIABLE = "LORAPLEX_API_KEY", "LORAPLEX_API_KEY_FILE"
CA_VARIABLE, CERT_VARIABLE, CERT_KEY_VARIABLE = "LORAPLEX_CA", "LORAPLEX_CERT", "LORAPLEX_KEY"
# The value of `ca` that stands for the certificate authorities of the system.
SYSTEM_CA = "system"


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS. They are read again when they change.

    `ca` signs the servers' certificates, `system` for the authorities of the system. `cert` and `key` are the client's
    own certificate, where it is the credential.
    """

    ca: str | Path = SYSTEM_CA
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError("tls: give cert and key together, or neither", field="tls")

    def files(self) -> list[Path]:
        """Return the files."""
        paths = [None if self.ca == SYSTEM_CA else self.ca, self.cert, self.key]
        return [Path(path) for path in paths if path is not None]

    def version(self) -> tuple[int, ...]:
        """Return numbers that change with the files; a file that is missing for a moment counts as 0."""
        return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in self.files())

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises InvalidRequestError."""
        try:
            ca = None if self.ca == SYSTEM_CA else Path(self.ca).read_bytes()
            key = None if self.key is None else Path(self.key).read_bytes()
            cert = None if self.cert is None else Path(self.cert).read_bytes()
        except OSError as error:
            raise InvalidRequestError(f"tls: {error.filename}: {error.strerror}", field="tls") from error
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True)
class Credentials:
    """A client's credentials; with neither a key nor TLS, the servers take the tenant's name as it is."""

    api_key: ApiKey = ""
    tls: Tls | None = None

    @property
    def name_the_caller(self) -> bool:
        """Return whether the tenant of the calls is the credential's."""
        return bool(self.api_key) or (self.tls is not None and self.tls.cert is not None)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call. Raises InvalidRequestError."""
        key = self.api_key() if callable(self.api_key) else self.api_key
        if not (key.isascii() and key.isprintable()):
            raise InvalidRequestError("api_key: has characters that no key or token has", field="api_key")
        return (("authorization", f"Bearer {key}"),) if key else ()

    def check(self, addresses: Sequence[str]) -> None:
        """Raise InvalidRequestError where the key would cross a network in clear."""
        for address in addresses:
            if self.api_key and self.tls is None and not _is_loopback(address):
                raise InvalidRequestError(
                    f"api_key: would go to {address} in clear; give tls=Tls(ca=...), or set {CA_VARIABLE}",
                    field="api_key",
                )


def credentials_of(api_key: ApiKey | None, tls: Tls | None, environ: Mapping[str, str] = os.environ) -> Credentials:
    """Return the credentials given, or else those of the environment. Raises InvalidRequestError."""
    if api_key is None:
        file = environ.get(KEY_FILE_VARIABLE)
        api_key = environ.get(KEY_VARIABLE, "") if not file else lambda: _read_key(file)
    if tls is None and (environ.get(CA_VARIABLE) or environ.get(CERT_VARIABLE)):
        cert, key = environ.get(CERT_VARIABLE) or None, environ.get(CERT_KEY_VARIABLE) or None
        tls = Tls(environ.get(CA_VARIABLE) or SYSTEM_CA, cert, key)
    return Credentials(api_key, tls)


def _read_key(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"api_key: {file} can't be read: {error}", field="api_key") from error


def _is_loopback(address: str) -> bool:
    target = address.rpartition("/")[2]
    if address.startswith("unix:") or target.startswith("unix:"):
        return True
    host = target.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
