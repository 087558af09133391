"""Test records of the audit log: changes, who made them, how they ended, and refused callers, so many a minute."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from loraplex.admin.v1 import keys_pb2 as pb
from loraplex.admin.v1 import keys_pb2_grpc, plans_pb2
from loraplex.runtime.rpc.errors import InvalidField, NotFound
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.audit_log import AuditLog
from loraplex.runtime.tenancy.auditor import (
    CALLER_LIMIT,
    COUNTED_LIMIT,
    LIMIT,
    OTHERS,
    WINDOW_S,
    Auditor,
    RefusedCallers,
    _values,
)
from loraplex.runtime.tenancy.guard import open_guard
from loraplex.runtime.tenancy.permissions import ENGINE_SERVICES, PERMISSIONS

Records = list[dict[str, Any]]


class Keys(keys_pb2_grpc.KeyServiceServicer):
    """Makes a key whose secret must not be recorded."""

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Any) -> pb.CreateKeyResponse:
        """Return the key of tests."""
        return pb.CreateKeyResponse(key=pb.Key(key_id="k1", tenant=request.tenant), api_key="lpx_k1_SECRET")

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Any) -> pb.RevokeKeyResponse:
        """Know no key."""
        raise NotFound("key", request.key_id)

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Any) -> pb.RotateKeyResponse:
        """Fail."""
        raise RuntimeError


class Resumes(inference_pb2_grpc.InferenceServiceServicer):
    """Refuses every resume token."""

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.ResumeResponse]:
        """Refuse the token."""
        raise InvalidField("resume_token", "is not ours", reason="RESUME_TOKEN_INVALID")
        yield inference_pb2.ResumeResponse()


class Kept(AuditLog):
    """A log that keeps its records in a list."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def record(self, event: str, **values: Any) -> None:
        """Keep an event."""
        self.records.append({"event": event, **values})

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def records() -> Records:
    """Return the events that were recorded."""
    return []


@pytest.fixture
async def channel(records: Records) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server whose calls are audited."""
    auditor = Auditor(Kept(records))
    server = Server(open_guard(refused=auditor.refused), interceptors=[auditor])
    keys_pb2_grpc.add_KeyServiceServicer_to_server(Keys(), server.services)  # type: ignore[abstract]  # as grpc makes them
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Resumes(), server.services)  # type: ignore[abstract]  # also
    port = server.bind("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


def test_every_method_that_may_change_something_is_audited() -> None:
    """But for one that keeps nothing, and those that are not served."""
    changing = {method for method, row in PERMISSIONS.items() if row.scope.endswith(".write") and row.audited is None}
    refused = ("FlushCache", "StartProfile", "StopProfile")
    not_served = {f"/{service}/{method}" for service in ENGINE_SERVICES for method in refused}
    assert changing == {"/loraplex.adapters.v1.AdapterService/ValidateAdapter", *not_served}


async def test_a_change_is_recorded_with_its_caller_and_without_the_secret(
    channel: grpc.aio.Channel, records: Records
) -> None:
    stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
    request = pb.CreateKeyRequest(tenant="globex", scopes=["generate"], label="x")
    request.ttl.FromSeconds(60)
    await stub.CreateKey(request)
    (record,) = records
    assert record.pop("peer").startswith("ipv4:127.0.0.1:")
    assert record == {
        "event": "call",
        "method": "KeyService/CreateKey",
        "caller": record["caller"],
        "credential": "header",
        "tenant": record["tenant"],
        "result": "OK",
        "details": {"tenant": "globex", "scopes": ["generate"], "label": "x", "ttl": "60s", "key_id": "k1"},
    }
    assert "SECRET" not in repr(records)


def test_a_limit_of_nothing_is_recorded_and_one_that_is_not_set_is_not() -> None:
    request = plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name="tenants/acme", tokens_per_day=0, weight=2.0))
    audited = PERMISSIONS["/loraplex.admin.v1.PlanService/SetPlan"].audited
    assert audited is not None
    assert _values(request, audited.request) == {"name": "tenants/acme", "tokens_per_day": 0, "weight": 2.0}


def test_prices_that_are_set_are_recorded() -> None:
    prices = plans_pb2.Prices(currency="EUR", of={"tiny": plans_pb2.Price(input=150, cached=75, output=600)})
    audited = PERMISSIONS["/loraplex.admin.v1.PlanService/SetPlan"].audited
    assert audited is not None
    recorded = _values(plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name="prices", prices=prices)), audited.request)
    assert recorded == {"name": "prices", "currency": "EUR", "of": ["tiny: input: 150 cached: 75 output: 600"]}


async def test_a_duration_that_is_none_is_recorded_by_its_numbers(channel: grpc.aio.Channel, records: Records) -> None:
    stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
    request = pb.CreateKeyRequest(tenant="globex")
    request.ttl.seconds, request.ttl.nanos = 1, 2**31 - 1
    await stub.CreateKey(request)
    assert records[0]["details"]["ttl"] == "1 s and 2147483647 ns"


async def test_changes_that_fail_are_recorded_too(channel: grpc.aio.Channel, records: Records) -> None:
    stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.RevokeKey(pb.RevokeKeyRequest(key_id="k2"))
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.RotateKey(pb.RotateKeyRequest(key_id="k3"))
    assert [(record["result"], record["details"]) for record in records] == [
        ("NOT_FOUND", {"key_id": "k2"}),
        ("INTERNAL", {"key_id": "k3"}),
    ]


async def test_refused_callers_and_tokens_are_recorded(channel: grpc.aio.Channel, records: Records) -> None:
    keys: Any = keys_pb2_grpc.KeyServiceStub(channel)
    inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError):
        await keys.ListKeys(pb.ListKeysRequest(), metadata=(("x-loraplex-tenant", "no tenant"),))
    with pytest.raises(grpc.aio.AioRpcError):
        await inference.Resume(inference_pb2.ResumeRequest(), metadata=(("x-loraplex-tenant", "acme"),)).read()
    assert [(record["event"], record["method"], record["tenant"]) for record in records] == [
        ("refused", "KeyService/ListKeys", ""),
        ("refused", "InferenceService/Resume", "acme"),
    ]
    assert records[1]["reason"] == "RESUME_TOKEN_INVALID"


def test_a_flood_of_refusals_is_counted(records: Records) -> None:
    now = [0.0]
    refused = RefusedCallers(Kept(records), lambda: now[0])
    for port in range(1_000):
        refused.note("", f"ipv4:10.0.0.1:{port}", "CREDENTIAL_INVALID")
    for host in range(1_000):
        refused.note("", f"ipv4:10.0.1.{host}:1", "CREDENTIAL_MISSING")
    assert len(records) == LIMIT
    assert [record["peer"].startswith("ipv4:10.0.0.1:") for record in records].count(True) == CALLER_LIMIT
    now[0] = WINDOW_S
    records.clear()
    refused.note("ada", "ipv4:10.0.0.2:1", "CREDENTIAL_INVALID")
    counts = {record["caller"]: record["count"] for record in records[:-1]}
    assert len(counts) == COUNTED_LIMIT + 1
    assert counts["ipv4:10.0.0.1"] == 1_000 - CALLER_LIMIT
    assert counts[OTHERS] > 800
    assert sum(counts.values()) + LIMIT == 2_000
    assert records[-1]["caller"] == "ada"
    records.clear()
    refused.flush()
    assert records == []
