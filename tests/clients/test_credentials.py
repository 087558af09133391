"""The SDK's credentials: where they come from, what goes with a call, and that no key crosses a network in clear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc
from starlette.datastructures import Headers

from loraplex.cli.development_ca import DevelopmentCa
from loraplex.gateway.cluster import Cluster
from loraplex.gateway.errors import HttpError
from loraplex.runtime.rpc.principal import Role, calling_tenant
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.api_keys import ApiKeyReader, HashedKey, HashedSecret, KeyDirectory, new_api_key
from loraplex.runtime.tenancy.certificates import CertificateReader
from loraplex.runtime.tenancy.guard import Guard
from loraplex.runtime.tenancy.permissions import Port
from loraplex_client import (
    AsyncClient,
    Client,
    InvalidRequestError,
    PermissionDeniedError,
    Tls,
    UnauthenticatedError,
)
from loraplex_client.connection import Connection
from loraplex_client.endpoint import TENANT_KEY, Credentials, credentials_of


def test_the_environment_has_the_credentials_of_a_client_without_any(tmp_path: Path) -> None:
    assert not credentials_of(None, None, {}).name_the_caller
    assert credentials_of(None, None, {"LORAPLEX_API_KEY": "lpx_a_b"}).metadata() == (
        ("authorization", "Bearer lpx_a_b"),
    )
    assert credentials_of("", None, {"LORAPLEX_API_KEY": "lpx_a_b"}).metadata() == ()
    environ = {"LORAPLEX_CA": "ca.pem", "LORAPLEX_CERT": "a.pem", "LORAPLEX_KEY": "a.key"}
    credentials = credentials_of(None, None, environ)
    assert credentials.tls == Tls("ca.pem", "a.pem", "a.key")
    assert credentials.name_the_caller


def test_a_key_file_is_read_before_each_call(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("lpx_a_1\n")
    found = credentials_of(None, None, {"LORAPLEX_API_KEY_FILE": str(file)})
    assert found.metadata() == (("authorization", "Bearer lpx_a_1"),)
    file.write_text("lpx_a_2\n")
    assert found.metadata() == (("authorization", "Bearer lpx_a_2"),)
    file.unlink()
    with pytest.raises(InvalidRequestError, match="can't be read"):
        found.metadata()


@pytest.mark.parametrize("address", ["router.example:50051", "10.0.0.7:50051", "dns:///router:50051"])
def test_a_key_does_not_cross_a_network_in_clear(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="in clear"):
        Client(address, api_key="lpx_a_b")
    Client(address, api_key="lpx_a_b", tls=Tls()).close()
    Client(address, "acme").close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/socket"])
def test_on_this_machine_it_may(address: str) -> None:
    Client(address, api_key="lpx_a_b").close()


def test_with_a_credential_the_tenant_is_the_credential_s() -> None:
    def connection(tenant: str, api_key: str) -> Connection:
        stub = inference_pb2_grpc.InferenceServiceStub
        return Connection("localhost:1", stub, tenant=tenant, credentials=Credentials(api_key))

    assert connection("", "lpx_a_b")._metadata == ()
    assert connection("acme", "lpx_a_b")._metadata == ((TENANT_KEY, "acme"),)
    assert connection("", "")._metadata == ((TENANT_KEY, "default"),)


def test_a_client_for_another_caller_shares_the_channels() -> None:
    def one(client: Client) -> Connection:
        return client._connection

    with Client("127.0.0.1:1", "acme", api_key="") as client:
        other, keyed = client.for_caller("globex"), client.for_caller(api_key="lpx_a_b")
        assert one(client)._metadata == ((TENANT_KEY, "acme"),)
        assert one(other)._metadata == ((TENANT_KEY, "globex"),)
        assert one(client.for_caller())._metadata == ((TENANT_KEY, "default"),)
        assert (one(keyed)._metadata, one(keyed)._credentials.metadata()) == (
            (),
            (("authorization", "Bearer lpx_a_b"),),
        )
        assert one(other)._channels is one(keyed)._channels is one(client)._channels
        with pytest.raises(InvalidRequestError, match="tenant"):
            client.for_caller("a\nb")
    with Client("router.example:1", api_key="") as client, pytest.raises(InvalidRequestError, match="in clear"):
        client.for_caller(api_key="lpx_a_b")


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cert and key together"):
        Tls(cert="a.pem")


class Models(inference_pb2_grpc.InferenceServiceServicer):
    """Lists one model, named like the tenant that asks."""

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        """Answer."""
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name=calling_tenant())])


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[tuple[int, int], DevelopmentCa, str]]:
    """The ports (for keys, for certificates) of a server, its authority, and a key of acme's."""
    ca, directory = DevelopmentCa(), KeyDirectory()
    key_id, text, sha256 = new_api_key()
    secrets = (HashedSecret(sha256),)
    directory.put([HashedKey(key_id, "acme", Role.TENANT_USER, frozenset(), None, False, secrets)])
    tls = TlsFiles(*ca.write(tmp_path, "router", ca.issue("loraplex://router/r", ["127.0.0.1"])), ca.write_ca(tmp_path))
    server = Server(Guard([Port.PUBLIC], [CertificateReader(), ApiKeyReader(directory)]))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Models(), server.services)  # type: ignore[abstract]
    ports = [server.bind("127.0.0.1", 0, tls.server_credentials(client_certificates=one)) for one in (False, True)]
    await server.start()
    yield (ports[0], ports[1]), ca, text
    await server.stop(0)


async def test_both_clients_come_with_a_key_or_a_certificate(served: Any, tmp_path: Path) -> None:
    (plain, mutual), ca, text = served
    authority = tmp_path / "ca.pem"
    cert, key = ca.write(tmp_path, "globex", ca.issue("loraplex://tenant/globex"))
    for port, options, tenant in (
        (plain, {"api_key": text, "tls": Tls(authority)}, "acme"),
        (plain, {"api_key": lambda: text, "tls": Tls(authority)}, "acme"),
        (mutual, {"tls": Tls(authority, cert, key)}, "globex"),
    ):
        async with AsyncClient(f"127.0.0.1:{port}", **options) as client:
            assert [model.name for model in await client.models()] == [tenant]
        with Client(f"127.0.0.1:{port}", **options) as blocking:
            assert [model.name for model in await asyncio.to_thread(blocking.models)] == [tenant]
    async with AsyncClient(f"127.0.0.1:{plain}", "globex", api_key=text, tls=Tls(authority)) as client:
        with pytest.raises(PermissionDeniedError):
            await client.models()
    async with AsyncClient(f"127.0.0.1:{plain}", tls=Tls(authority)) as client:
        with pytest.raises(UnauthenticatedError):
            await client.models()


async def test_a_gateway_passes_each_request_s_credential_on(served: Any, tmp_path: Path) -> None:
    (plain, _), _, text = served
    gateway = Cluster(f"127.0.0.1:{plain}", "", str(tmp_path / "ca.pem"))
    for given in ({"authorization": f"Bearer {text}"}, {"x-api-key": text}):
        for tenant in ({}, {TENANT_KEY: "acme"}):
            models = await gateway.models(gateway.caller(Headers({**given, **tenant})))
            assert [model.name for model in models] == ["acme"]
    for headers, kind in (
        ({}, UnauthenticatedError),
        ({TENANT_KEY: "acme"}, UnauthenticatedError),
        ({"x-api-key": f"{text}x"}, UnauthenticatedError),
        ({"x-api-key": text, TENANT_KEY: "globex"}, PermissionDeniedError),
    ):
        with pytest.raises(kind):
            await gateway.models(gateway.caller(Headers(headers)))
    for headers in ({"authorization": f"Basic {text}"}, {"authorization": f"Bearer {text}", "x-api-key": "lpx_a_b"}):
        with pytest.raises(HttpError) as caught:
            gateway.caller(Headers(headers))
        assert caught.value.status == 401
    await gateway.close()


async def test_a_client_takes_its_new_certificate(served: Any, tmp_path: Path) -> None:
    (_, mutual), ca, _ = served
    cert, key = ca.write(tmp_path, "mine", ca.issue("loraplex://tenant/acme"))
    async with AsyncClient(f"127.0.0.1:{mutual}", tls=Tls(tmp_path / "ca.pem", cert, key)) as client:
        assert [model.name for model in await client.models()] == ["acme"]
        ca.write(tmp_path, "mine", ca.issue("loraplex://tenant/globex"))
        assert [model.name for model in await client.models()] == ["globex"]
