"""TLS to Redis and passwords from files, all of which are replaced while a process runs.

TLS ends at a proxy in front of the real server, because the wheel's server is built without TLS.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from loraplex.cli.development_ca import DevelopmentCa, write_private
from loraplex.contracts.broker.connection import RedisUnreachableError, connect
from tests.broker.test_connection import use


class TLSProxy:
    """Ends TLS on a port, asks clients for certificates, and hands the rest to the server's socket."""

    def __init__(self, directory: Path, server: str) -> None:
        self._directory = directory
        self._server = server.removeprefix("unix://")
        self._listening: asyncio.Server | None = None
        self.port = 0

    async def start(self, ca: DevelopmentCa, host: str = "localhost") -> None:
        """Listen with a new certificate; connections that stand go on."""
        if self._listening is not None:
            self._listening.close()
        cert, key = ca.write(self._directory, "server", ca.issue("loraplex://store/redis", [host]))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        context.load_verify_locations(cadata=ca.pem.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        self._listening = await asyncio.start_server(self._serve, "localhost", self.port, ssl=context)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._server)
        await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))

    def stop(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            self._listening.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()


@pytest.fixture
async def proxy(tmp_path: Path, valkey_url: str, redis: Redis) -> AsyncIterator[TLSProxy]:
    proxy = TLSProxy(tmp_path, valkey_url)
    yield proxy
    proxy.stop()


def client_files(directory: Path, ca: DevelopmentCa) -> str:
    """Write the files of a router and return the URL's options that name them."""
    (directory / "ca.pem").write_bytes(ca.pem)
    cert, key = ca.write(directory, "router", ca.issue("loraplex://router/1"))
    return f"ssl_ca_certs={directory / 'ca.pem'}&ssl_certfile={cert}&ssl_keyfile={key}"


async def test_certificates_are_read_again_when_they_change(
    tmp_path: Path, proxy: TLSProxy, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = DevelopmentCa(), DevelopmentCa()
    options = client_files(tmp_path, first)
    await proxy.start(first)
    url = f"rediss://localhost:{proxy.port}?{options}"
    await use(url)
    async with await connect(url) as client:
        await proxy.start(second)
        await client.ping()  # its connection stands
        with pytest.raises(RedisUnreachableError, match="certificate verify failed"):
            await connect(url)
        key = tmp_path / "router-key.pem"
        was = key.read_bytes()
        client_files(tmp_path, second)
        now = key.read_bytes()
        key.write_bytes(was)  # as though it had not been replaced yet
        with caplog.at_level(logging.WARNING), pytest.raises(RedisUnreachableError):
            await connect(url)
        assert "the former content stays: --redis-url" in caplog.text
        key.write_bytes(now)
        await client.connection_pool.disconnect()
        await client.ping()
    await use(url)


async def test_a_server_is_known_by_its_name_and_wants_a_certificate(tmp_path: Path, proxy: TLSProxy) -> None:
    ca = DevelopmentCa()
    options = client_files(tmp_path, ca)
    await proxy.start(ca, "elsewhere")
    with pytest.raises(RedisUnreachableError, match="Hostname mismatch"):
        await connect(f"rediss://localhost:{proxy.port}?{options}")
    await proxy.start(ca)
    with pytest.raises(RedisUnreachableError, match="no answer"):
        await connect(f"rediss://localhost:{proxy.port}?ssl_ca_certs={tmp_path / 'ca.pem'}")


async def test_a_password_is_rotated_while_both_count(tmp_path: Path, redis: Redis, valkey_url: str) -> None:
    file = tmp_path / "password"
    write_private(file, b"first\n")
    await redis.acl_setuser("loraplex", enabled=True, passwords=["+first"], keys=["lp:*"], categories=["+@all"])
    url = valkey_url.replace("unix://", "unix://loraplex@") + f"?password_file={file}"
    try:
        async with await connect(url) as client:
            await redis.acl_setuser("loraplex", enabled=True, passwords=["+second"])
            write_private(file, b"second\n")
            await redis.acl_setuser("loraplex", enabled=True, passwords=["-first"])
            await client.ping()  # its connection stands
            await client.connection_pool.disconnect()
            await client.ping()
            file.unlink()
            await client.connection_pool.disconnect()
            with pytest.raises(RedisConnectionError, match="password_file: cannot read"):
                await client.ping()
    finally:
        await redis.acl_deluser("loraplex")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("ssl_ca_certs=/nowhere/ca.pem", "ssl_ca_certs: cannot read /nowhere/ca.pem"),
        ("password_file=/nowhere/password", "password_file: cannot read /nowhere/password"),
        ("password_file=/dev/null", "password_file: /dev/null is empty"),
    ],
)
async def test_files_that_cannot_be_read_are_named(options: str, why: str) -> None:
    with pytest.raises(RedisUnreachableError, match=why):
        await connect(f"rediss://localhost:1?{options}")
