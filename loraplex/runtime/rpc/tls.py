"""TLS of a process: its certificate and the authority of its peers, from files that are read again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from loraplex.runtime.files import FollowedFiles, is_private

log = logging.getLogger(__name__)

S = TypeVar("S")

CERT_HELP = "PEM file with this process's certificate, which turns TLS and credentials on; with --tls-key and --tls-ca"
KEY_HELP = "PEM file with the certificate's private key"
CA_HELP = "PEM file with the authorities that sign the certificates of clients and other processes"
# Time in seconds that the calls of a channel get to end after the certificate has changed.
CLOSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the three files."""

    cert: bytes
    key: bytes
    ca: bytes


class TlsFiles(FollowedFiles[Pems]):
    """The three files of a process. Raises ValueError where they cannot be used."""

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        if key.is_file() and not is_private(key):
            log.warning("others than the owner may read %s; `chmod 600` it", key)

        def read() -> Pems:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key, password="")  # an encrypted key must not ask at a terminal
            context.load_verify_locations(ca)
            return Pems(cert.read_bytes(), key.read_bytes(), ca.read_bytes())

        super().__init__(f"--tls-cert {cert}, --tls-key {key}, --tls-ca {ca}", (cert, key, ca), read)

    def server_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """Return the credentials of a port, which requires a certificate of its clients or asks for none."""
        version = self.version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal version
            self.look()
            if self.version == version:
                return None
            version = self.version
            return self._configuration()

        fetch: Any = changed  # its type in the stubs leaves out None, which means: as before
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), fetch, require_client_authentication=client_certificates
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel to another process of the cluster."""
        return grpc.ssl_channel_credentials(self.content.ca, self.content.key, self.content.cert)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pems = self.content
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)


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
        if self._tls is not None:
            self._tls.look(recent=True)
        if self._tls is not None and self._tls.version != self._version:
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
        self._tls.look()
        self._version = self._tls.version
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
