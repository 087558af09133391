"""A gateway that speaks HTTPS: its certificate is read again, and connections count before their handshake ends."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from loraplex.cli.development_ca import DevelopmentCa, write_private
from loraplex.gateway.app import serving
from loraplex.gateway.endpoint import GatewayMetrics
from loraplex.gateway.http_server import OwnCertificate
from loraplex.gateway.settings import GatewaySettings
from loraplex.runtime.rpc.settings import SettingsError

ASKED = b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"


def write(directory: Path, ca: DevelopmentCa) -> tuple[str, str]:
    """Write a certificate of the authority; return the paths of it and its key."""
    cert, key = ca.write(directory, "gateway", ca.issue("loraplex://tenant/none", ["127.0.0.1"]))
    return str(cert), str(key)


@asynccontextmanager
async def connection(
    address: str, ca: DevelopmentCa
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect as a client that trusts this authority alone."""
    host, _, port = address.rpartition(":")
    trusted = ssl.create_default_context(cadata=ca.pem.decode())
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusted)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send a request; return the first line of the answer."""
    writer.write(ASKED)
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    return head.partition(b"\r\n")[0]


async def test_a_new_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    first, second = DevelopmentCa(), DevelopmentCa()
    cert, key = write(tmp_path, first)
    settings = GatewaySettings("127.0.0.1:1", port=0, tls_cert=cert, tls_key=key)
    async with serving(settings, GatewayMetrics()) as (address, _), connection(address, first) as former:
        assert await answered(*former) == b"HTTP/1.1 404 Not Found"
        write_private(Path(key), second.issue("loraplex://tenant/none")[1])  # the certificate follows
        async with connection(address, first) as between:
            assert await answered(*between) == b"HTTP/1.1 404 Not Found"
        write(tmp_path, second)
        async with connection(address, second) as new:
            assert await answered(*new) == b"HTTP/1.1 404 Not Found"
        with pytest.raises(ssl.SSLCertVerificationError):
            async with connection(address, first):
                pass
        assert await answered(*former) == b"HTTP/1.1 404 Not Found"


def test_files_that_do_not_go_together_are_read_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection looks at the files."""
    ca = DevelopmentCa()
    own = OwnCertificate(*write(tmp_path, ca))
    read = MagicMock(wraps=own._read)
    monkeypatch.setattr(own, "_read", read)
    former, pair = own.content, ca.issue("loraplex://tenant/none", ["127.0.0.1"])
    write_private(tmp_path / "gateway-key.pem", pair[1])
    for _ in range(3):
        own.look()
    assert (read.call_count, len(caplog.records), own.content) == (1, 1, former)
    ca.write(tmp_path, "gateway", pair)
    own.look()
    assert own.content is not former


def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    cert, key = write(tmp_path, DevelopmentCa())
    Path(key).write_text("none")
    with pytest.raises(SettingsError, match=r"--tls-cert .*gateway\.pem, --tls-key"):
        OwnCertificate(cert, key)
