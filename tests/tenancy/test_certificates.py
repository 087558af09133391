"""Client certificates: whom their URIs name, and files that change while servers and channels use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.cli.development_ca import DevelopmentCa, write_private
from loraplex.runtime.files import is_private
from loraplex.runtime.rpc.principal import Role, Unauthenticated
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.tls import LiveChannel, TlsFiles, tls_of
from loraplex.runtime.tenancy.certificates import CertificateReader, principal_of

HOSTS = ["127.0.0.1"]


@pytest.fixture(scope="module")
def ca() -> DevelopmentCa:
    """An authority."""
    return DevelopmentCa()


@pytest.mark.parametrize(
    ("uri", "role", "tenant"),
    [
        ("loraplex://tenant/acme", Role.TENANT_USER, "acme"),
        ("loraplex://tenant-admin/acme", Role.TENANT_ADMIN, "acme"),
        ("loraplex://operator/ann", Role.OPERATOR, ""),
        ("loraplex://auditor/bob", Role.AUDITOR, ""),
        ("loraplex://router/r-1", Role.ROUTER, ""),
        ("loraplex://worker/w-1", Role.WORKER, ""),
        ("loraplex://store/s", Role.STORE, ""),
    ],
)
def test_the_uri_says_who_it_is(ca: DevelopmentCa, uri: str, role: Role, tenant: str) -> None:
    found = principal_of(ca.issue(uri)[0])
    assert found is not None
    assert (found.roles, found.tenant) == (frozenset({role}), tenant)
    assert found.expires_at is not None


@pytest.mark.parametrize(
    "uri",
    [
        "loraplex://tenant/shared",
        "loraplex://tenant/A",
        "loraplex://tenant/acme/more",
        "loraplex://tenant/",
        "loraplex://tenant-user/acme",
        "loraplex://root/acme",
        "https://tenant/acme",
    ],
)
def test_other_uris_name_nobody(ca: DevelopmentCa, uri: str) -> None:
    pem = ca.issue(uri)[0]
    assert principal_of(pem) is None
    with pytest.raises(Unauthenticated, match="names nobody"):
        CertificateReader().read((), {"x509_pem_cert": [pem]})


@pytest.mark.parametrize("strange", [b"\xa3\x00", b"\xa5\x05\xa1\x03\x0c\x01a", b"\x87\x03123", b"\x82\x01\xff"])
def test_a_certificate_with_a_name_that_nobody_reads_names_nobody(strange: bytes) -> None:
    uri, name, now = b"loraplex://operator/ann", x509.Name([]), datetime.now(UTC)
    names = b"\x86%c%b%b" % (len(uri), uri, strange)
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
        .add_extension(
            x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"0%c%b" % (len(names), names)), False
        )
        .sign(key, hashes.SHA256())
    )
    assert principal_of(made.public_bytes(Encoding.PEM)) is None


def test_a_host_name_that_looks_like_a_uri_names_nobody(ca: DevelopmentCa) -> None:
    assert principal_of(ca.issue("https://a", ["operator.example"])[0]) is None
    assert principal_of(b"no certificate") is None


def test_a_connection_does_not_outlive_its_certificate(ca: DevelopmentCa) -> None:
    now = [0.0]
    pem = ca.issue("loraplex://tenant/acme")[0]
    reader = CertificateReader(lambda: now[0])
    found = reader.read((), {"x509_pem_cert": [pem]})
    assert found is not None
    now[0] = found.expires_at or 0.0
    with pytest.raises(Unauthenticated, match="expired"):
        reader.read((), {"x509_pem_cert": [pem]})


def test_a_connection_without_a_certificate_is_left_to_other_readers() -> None:
    assert CertificateReader().read((), {"transport_security_type": [b"ssl"]}) is None


@pytest.fixture
async def served(ca: DevelopmentCa, tmp_path: Path) -> AsyncIterator[tuple[Server, int, int]]:
    """A server with a port for all and one for clients with certificates; its files are in `tmp_path`."""
    tls = TlsFiles(*ca.write(tmp_path, "store", ca.issue("loraplex://store/s", HOSTS)), ca.write_ca(tmp_path))
    server = Server()
    ports = [server.bind("127.0.0.1", 0, tls.server_credentials(client_certificates=one)) for one in (False, True)]
    await server.start()
    yield server, ports[0], ports[1]
    await server.stop(0)


async def ask(channel: grpc.aio.Channel) -> str:
    """Return the code of a health check."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def check(port: int, ca: DevelopmentCa, pair: tuple[bytes, bytes] | None = None) -> str:
    """Return the code of a health check at a TLS port."""
    cert, key = pair or (None, None)
    credentials = grpc.ssl_channel_credentials(ca.pem, key, cert)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        return await ask(channel)


async def test_a_port_for_certificates_takes_those_of_its_authority_alone(served: Any, ca: DevelopmentCa) -> None:
    _, plain, mutual = served
    uri = "loraplex://tenant/acme"
    assert await check(plain, ca) == "OK"
    assert await check(mutual, ca) == "UNAVAILABLE"
    assert await check(mutual, ca, ca.issue(uri)) == "OK"
    assert await check(mutual, ca, DevelopmentCa().issue(uri)) == "UNAVAILABLE"
    assert await check(mutual, ca, ca.issue(uri, life=timedelta(hours=-1))) == "UNAVAILABLE"
    assert await check(plain, DevelopmentCa()) == "UNAVAILABLE"


async def test_files_that_change_hold_for_the_next_connection(served: Any, ca: DevelopmentCa, tmp_path: Path) -> None:
    _, plain, mutual = served
    new = DevelopmentCa()
    uri = "loraplex://tenant/acme"
    new.write(tmp_path, "store", new.issue("loraplex://store/s", HOSTS))
    new.write_ca(tmp_path)
    assert await check(plain, ca) == "UNAVAILABLE"
    assert await check(plain, new) == "OK"
    assert await check(mutual, new, ca.issue(uri)) == "UNAVAILABLE"
    assert await check(mutual, new, new.issue(uri)) == "OK"


async def test_a_connection_does_not_outlive_its_authority_for_long(
    ca: DevelopmentCa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.runtime.files.LOOK_S", 0.0)
    monkeypatch.setattr("loraplex.runtime.rpc.server.AGE_MS", 100)
    new, server = DevelopmentCa(), Server()
    tls = TlsFiles(*ca.write(tmp_path, "store", ca.issue("loraplex://store/s", HOSTS)), ca.write_ca(tmp_path))
    port = server.bind("127.0.0.1", 0, tls.server_credentials(client_certificates=True))
    await server.start()
    cert, key = ca.issue("loraplex://tenant/acme")
    credentials = grpc.ssl_channel_credentials(ca.pem, key, cert)
    async with asyncio.timeout(60), grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        assert await ask(channel) == "OK"
        new.write(tmp_path, "store", new.issue("loraplex://store/s", HOSTS))
        new.write_ca(tmp_path)
        while await ask(channel) == "OK":
            pass
        await server.set_serving(True)
        assert (await watch.read()).status  # what runs goes on
    await server.stop(0)


async def test_a_certificate_whose_key_has_not_come_yet_is_not_taken(
    served: Any, ca: DevelopmentCa, tmp_path: Path
) -> None:
    _, plain, _ = served
    pair = ca.issue("loraplex://store/s", HOSTS)
    (tmp_path / "store.pem").write_bytes(pair[0])
    assert await check(plain, ca) == "OK"
    (tmp_path / "store-key.pem").write_bytes(pair[1])
    assert await check(plain, ca) == "OK"


async def test_a_channel_takes_its_new_certificate(
    served: Any, ca: DevelopmentCa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.runtime.files.LOOK_S", 0.0)
    _, _, mutual = served
    mine = tmp_path / "router"
    mine.mkdir()
    tls = TlsFiles(*ca.write(mine, "router", DevelopmentCa().issue("loraplex://router/r")), ca.write_ca(mine))
    channel = LiveChannel(f"127.0.0.1:{mutual}", tls, ())
    check_health: Any = channel.stub(health_pb2_grpc.HealthStub)
    with pytest.raises(grpc.aio.AioRpcError):
        await check_health.Check(health_pb2.HealthCheckRequest(), timeout=10)
    ca.write(mine, "router", ca.issue("loraplex://router/r"))
    check_health = channel.stub(health_pb2_grpc.HealthStub)
    await check_health.Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert channel.stub(health_pb2_grpc.HealthStub) is check_health
    await channel.close()


def test_settings_give_all_files_or_none(ca: DevelopmentCa, tmp_path: Path) -> None:
    authority = ca.write_ca(tmp_path)
    cert, key = ca.write(tmp_path, "a", ca.issue("loraplex://store/s"))
    assert is_private(key)
    assert tls_of("", "", "") is None
    assert tls_of(str(cert), str(key), str(authority)) is not None
    for given in ((cert, "", authority), (cert, key, ""), (cert, key, tmp_path / "none"), (cert, cert, authority)):
        with pytest.raises(ValueError, match="--tls-cert"):
            tls_of(*map(str, given))


def test_files_that_do_not_go_together_are_read_and_reported_once(
    tmp_path: Path, ca: DevelopmentCa, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job that is sealed looks at the files."""
    cert, key = ca.write(tmp_path, "r", ca.issue("loraplex://router/r"))
    tls = TlsFiles(cert, key, ca.write_ca(tmp_path))
    read = MagicMock(wraps=tls._read)
    monkeypatch.setattr(tls, "_read", read)
    pair = ca.issue("loraplex://router/r")
    write_private(key, pair[1])
    assert not any(tls.look() for _ in range(3))
    key.unlink()
    assert not any(tls.look() for _ in range(3))
    assert (read.call_count, len(caplog.records)) == (1, 2)
    ca.write(tmp_path, "r", pair)
    assert [tls.look() for _ in range(3)] == [True, False, False]
    assert tls.content.key == pair[1]
