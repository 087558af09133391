"""The permissions table has every RPC and no other, its page is current, and a method without a row does not start."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from loraplex.inference.v1 import inference_pb2_grpc

from loraplex.runtime.rpc.principal import TENANT_ROLES, Role
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.rpc.settings import is_installed
from loraplex.runtime.tenancy.guard import Guard, UndeclaredMethodError
from loraplex.runtime.tenancy.permissions import (
    PERMISSIONS,
    REFLECTION_SERVICE,
    SGLANG_SERVICE,
    VLLM_SERVICE,
    Permission,
    Port,
)
from tests.tenancy.permissions_page import page

ROOT = Path(__file__).parents[2]


# Services of packages that need not be installed, and the modules with their descriptors.
OPTIONAL = {
    SGLANG_SERVICE: "smg_grpc_proto.generated.sglang_scheduler_pb2",
    VLLM_SERVICE: "smg_grpc_proto.generated.vllm_engine_pb2",
    REFLECTION_SERVICE: "grpc_reflection.v1alpha.reflection_pb2",
}


# Services that others serve, to routers.
HOOKS = "loraplex.hooks.v1"


def methods_of_protos() -> set[str]:
    """Return every method of every service in protos/ but hooks, of health, and of the packages that are installed."""
    files = [health_pb2.DESCRIPTOR.name]
    files += [importlib.import_module(module).DESCRIPTOR.name for module in OPTIONAL.values() if is_importable(module)]
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        name = path.relative_to(ROOT / "protos")
        importlib.import_module(".".join(name.with_suffix("").parts) + "_pb2")
        files.append(str(name))
    found = [descriptor_pool.Default().FindFileByName(name) for name in files]
    return {
        f"/{service.full_name}/{method.name}"
        for file in found
        for service in file.services_by_name.values()
        if file.package != HOOKS
        for method in service.methods
    }


def is_importable(module: str) -> bool:
    return is_installed(module.partition(".")[0])


def test_the_table_has_every_rpc_and_no_other() -> None:
    absent = {service for service, module in OPTIONAL.items() if not is_importable(module)}
    assert {name for name in PERMISSIONS if name.split("/")[1] not in absent} == methods_of_protos()


def test_the_page_is_made_from_the_table() -> None:
    command = "python -m tests.tenancy.permissions_page docs/reference/permissions.md"
    assert (ROOT / "docs" / "reference" / "permissions.md").read_text(encoding="utf-8") == page(), f"run {command}"


def test_tenants_reach_nothing_at_the_operators_port_and_operators_nothing_but_jobs_at_the_public_one() -> None:
    for method, row in PERMISSIONS.items():
        assert not TENANT_ROLES & row.roles.get(Port.OPERATORS, frozenset()), method
        assert row.roles.get(Port.PUBLIC, frozenset()) <= TENANT_ROLES, method
        assert row.anybody or row.scope, method
        assert row.anybody or row.roles, method
        assert Role.STORE not in frozenset().union(*row.roles.values()), method


async def test_a_method_without_a_row_does_not_start() -> None:
    rows = {name: row for name, row in PERMISSIONS.items() if not name.endswith("/Resume")}
    server = Server(Guard(Port, [], permissions=rows))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        inference_pb2_grpc.InferenceServiceServicer(),  # type: ignore[abstract]
        server.services,
    )
    server.bind("127.0.0.1", 0)
    with pytest.raises(UndeclaredMethodError, match="InferenceService/Resume has no row"):
        await server.start()


async def test_a_generic_method_without_a_row_is_refused() -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return request

    server = Server(Guard(Port, []))
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
    server.services.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", handlers),))
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/a.Service/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    await server.stop(0)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_an_empty_permission_allows_nobody() -> None:
    assert not Permission().allows(frozenset(Role), frozenset(Port))
