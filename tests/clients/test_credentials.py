"""The SDK's credentials: where they come from, what goes with a call, and that no key crosses a network in clear."""

from __future__ import annotations

from pathlib import Path

import pytest
from loraplex.inference.v1 import inference_pb2_grpc
from loraplex_client import Client, InvalidRequestError, Tls
from loraplex_client.connection import TENANT_KEY, Connection
from loraplex_client.credentials import Credentials, credentials_of


def test_the_environment_has_the_credentials_of_a_client_without_any(tmp_path: Path) -> None:
    assert not credentials_of(None, None, {}).given
    assert credentials_of(None, None, {"LORAPLEX_API_KEY": "lpx_a_b"}).metadata() == (
        ("authorization", "Bearer lpx_a_b"),
    )
    assert credentials_of("", None, {"LORAPLEX_API_KEY": "lpx_a_b"}).metadata() == ()
    environ = {"LORAPLEX_CA": "ca.pem", "LORAPLEX_CERT": "a.pem", "LORAPLEX_KEY": "a.key"}
    found = credentials_of(None, None, environ)
    assert found.tls == Tls("ca.pem", "a.pem", "a.key")
    assert found.given


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


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cert and key together"):
        Tls(cert="a.pem")
