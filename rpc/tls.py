"""TLS of a process: its certificate and the authority of its peers, from files that are read again when they change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from files import WatchedFiles

log = logging.getLogger(__name__)

S = TypeVar("S")

CERT_HELP = "PEM file with this process's certificate, which turns TLS and credentials on; with --tls-key and --tls-ca"
KEY_HELP = "PEM file with the certificate's private key"
CA_HELP = "PEM file with the authorities that sign the certificates of clients and of the other processes"
# Time in seconds that the calls of a channel get to end after the certificate has changed.
CLOSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the three files."""

    cert: bytes
    key: bytes
    ca: bytes


class TlsFiles:
    """The three files of a process. Raises ValueError where they cannot be used."""

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self._cert, self._key, self._ca = cert, key, ca
        if key.is_file() and not is_private(key):
            log.warning("others than the owner may read %s; `chmod 600` it", key)
        self._files = WatchedFiles(cert, key, ca)
        self._changed()
        self._last_logged = ""
        self._pems = self._read()
        # Grows when the files have changed.
        self.version = 0

    @property
    def pems(self) -> Pems:
        """Return the contents that were read last."""
        return self._pems

    def look(self, *, recent: bool = False) -> int:
        """Read the files again if they have changed; return the version. What cannot be used yet is not taken.

        With `recent` a look of a moment ago is enough.
        """
        try:
            if self._changed(recent=recent):
                self._pems = self._read()
                self._last_logged = ""
                self.version += 1
                log.info("read %s, %s and %s again", self._cert, self._key, self._ca)
        except ValueError as error:  # one of the files has been replaced, the other follows
            if str(error) != self._last_logged:
                log.warning("keeps the former certificate: %s", error)
            self._last_logged = str(error)
        return self.version

    def server_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """Return the credentials of a port, which requires a certificate of its clients or asks for none."""
        version = self.look()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal version
            if self.look() == version:
                return None
            version = self.version
            return self._configuration()

        fetch: Any = changed  # its type in the stubs leaves out None, which means: as before
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), fetch, require_client_authentication=client_certificates
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel to another process of the cluster."""
        return grpc.ssl_channel_credentials(self._pems.ca, self._pems.key, self._pems.cert)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pems = self._pems
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

    def _changed(self, *, recent: bool = False) -> bool:
        try:
            return self._files.changed(recent=recent)
        except OSError as error:
            raise ValueError(f"--tls-cert, --tls-key, --tls-ca: {error.filename}: {error.strerror}") from error

    def _read(self) -> Pems:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password="")  # an encrypted key must not ask at a terminal
            context.load_verify_locations(self._ca)
            return Pems(self._cert.read_bytes(), self._key.read_bytes(), self._ca.read_bytes())
        except (OSError, ssl.SSLError) as error:
            self._files.failed()
            raise ValueError(f"--tls-cert {self._cert}, --tls-key {self._key}, --tls-ca {self._ca}: {error}") from error


def tls_of(cert: str, key: str, ca: str) -> TlsFiles | None:
    """Return the files of the settings; None where TLS is off. Raises ValueError."""
    paths = (cert, key, ca)
    if not any(paths):
        return None
    if not all(paths):
        raise ValueError("--tls-cert, --tls-key, --tls-ca: give all three, or none")
    return TlsFiles(*map(Path, paths))


class LiveChannel:
    """A channel to another process, with TLS if there are files; another one is opened when the files change."""

    def __init__(self, address: str, tls: TlsFiles | None, options: Sequence[tuple[str, Any]]) -> None:
        self._address, self._tls, self._options = address, tls, list(options)
        self._stubs: dict[Any, Any] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    def stub(self, make: Callable[[grpc.aio.Channel], S]) -> S:
        """Return a service's stub at the present channel."""
        if self._tls is not None and self._tls.look(recent=True) != self._version:
            closing = asyncio.create_task(self._channel.close(CLOSE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._open()
        if make not in self._stubs:
            self._stubs[make] = make(self._channel)
        stub: S = self._stubs[make]
        return stub

    def _open(self) -> None:
        self._stubs = {}
        if self._tls is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
            return
        self._version = self._tls.look()
        credentials = self._tls.channel_credentials()
        self._channel = grpc.aio.secure_channel(self._address, credentials, options=self._options)

    async def __aenter__(self) -> Self:
        """Return the channel, which is closed at the end of the context."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close it."""
        await self.close()

    async def close(self) -> None:
        """Close the channel, and those before it."""
        for closing in self._closing:
            closing.cancel()
        await self._channel.close()


def is_private(path: Path) -> bool:
    """Tell whether only a file's owner may read it."""
    return not os.stat(path).st_mode & 0o077
