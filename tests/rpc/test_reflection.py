"""Server reflection: operators read the services of a server and their messages, tenants are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.settings import check_installed
from loraplex.runtime.tenancy.access import AccessSettings
from loraplex.runtime.tenancy.guard import Guard
from loraplex.runtime.tenancy.permissions import Port

pytest.importorskip("grpc_reflection", reason="grpcio-reflection is not installed")

from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha import reflection_pb2_grpc

INFERENCE = "loraplex.inference.v1.InferenceService"


class Nothing(inference_pb2_grpc.InferenceServiceServicer):
    """Serves no method."""


class Everybody:
    """Takes every caller for one of a role."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def read(self, metadata: Any, auth_context: Any) -> Principal:
        return Principal("one", frozenset({self.role}), CredentialKind.API_KEY, "acme")


@asynccontextmanager
async def reflecting(role: Role, port: Port) -> AsyncIterator[Any]:
    """Serve callers of the role at such a port."""
    server = Server(Guard([port], [Everybody(role)]))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Nothing(), server.services)  # type: ignore[abstract]  # as grpc makes them
    server.add_reflection()
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    await server.stop(0)


async def test_operators_read_services_and_messages() -> None:
    async with reflecting(Role.OPERATOR, Port.OPERATORS) as ask:
        asked = [
            pb.ServerReflectionRequest(list_services=""),
            pb.ServerReflectionRequest(file_containing_symbol=INFERENCE),
            pb.ServerReflectionRequest(file_containing_symbol="nothing.of.this.Name"),
        ]
        services, file, unknown = [answer async for answer in ask(iter(asked))]
    names = {service.name for service in services.list_services_response.service}
    assert names == {INFERENCE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    found = file.file_descriptor_response.file_descriptor_proto
    assert "loraplex.inference.v1" in {FileDescriptorProto.FromString(one).package for one in found}
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@pytest.mark.parametrize(
    ("role", "port"),
    [(Role.TENANT_ADMIN, Port.PUBLIC), (Role.OPERATOR, Port.PUBLIC), (Role.AUDITOR, Port.OPERATORS)],
)
async def test_others_are_refused(role: Role, port: Port) -> None:
    async with reflecting(role, port) as ask:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask().read()  # without a message, whose writing may fail first
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.runtime.rpc.settings.find_spec", lambda module: None)
    with pytest.raises(ValueError, match=r"--reflection: needs the package grpcio-reflection: pip install"):
        AccessSettings(reflection=True).check_access("127.0.0.1", insecure_tenants=False)
    with pytest.raises(ValueError, match=r"needs the package smg-grpc-proto: pip install 'loraplex\[smg\]'"):
        check_installed("--engine-protocol", "smg_grpc_proto")
