"""A trainer's key pushes revisions that expire, removes what trainers pushed, and changes nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from tests.adapter_store.conftest import Client, chunks
from tests.adapter_store.test_own_keys import World, running


class Run:
    """A store with a hash model, and calls with keys of a tenant."""

    def __init__(self, world: World, keys: dict[str, Any]) -> None:
        self._world, self._keys = world, keys
        self.stub: Any = adapters_pb2_grpc.AdapterServiceStub(world.tenants)

    async def push(self, role: str, name: str, weights: str, ttl_s: int = 60, **header: Any) -> Any:
        """Upload a revision; ttl_s 0: without a time to live."""
        sent = pb.UploadHeader(adapter=name, **header)
        if ttl_s:
            sent.ttl.FromSeconds(ttl_s)
        files = {CONFIG_FILE: b"{}", WEIGHTS_FILE: weights.encode()}
        parts = [pb.UploadRevisionRequest(header=sent)]
        parts += [pb.UploadRevisionRequest(chunk=part) for part in chunks(files)]
        return await self.stub.UploadRevision(iter(parts), metadata=self.bearer(role))

    async def ask(self, role: str, method: str, request: Any) -> Any:
        """Call a method."""
        return await getattr(self.stub, method)(request, metadata=self.bearer(role))

    def bearer(self, role: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call."""
        return (self._world.bearer(self._keys[role]),)


@pytest.fixture
async def run(tmp_path: Path, hash_base: BaseModel) -> AsyncIterator[Run]:
    async with running(tmp_path) as world:
        operators = object.__new__(Client)
        operators.stub = adapters_pb2_grpc.AdapterServiceStub(world.operators)
        await operators.register(hash_base)
        yield Run(world, {role: await world.key("acme", role) for role in ("trainer", "tenant-admin")})


async def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, str(caught.value.details())


async def test_a_trainer_pushes_and_removes_what_trainers_pushed(run: Run) -> None:
    first = await run.push("trainer", "policy", "step 1")
    assert first.revision.HasField("expire_time")
    assert first.adapter.aliases == {"live": first.revision.digest}
    assert (await run.push("trainer", "policy", "step 2", alias="-")).created
    code, message = await refused(run.push("trainer", "policy", "step 3", ttl_s=0))
    assert (code, message) == (
        "INVALID_ARGUMENT",
        "header.ttl: is required of the role trainer, whose revisions expire",
    )
    await run.ask("trainer", "DeleteAdapter", pb.DeleteAdapterRequest(name="policy"))
    assert not (await run.ask("tenant-admin", "ListAdapters", pb.ListAdaptersRequest())).adapters


async def test_a_trainer_changes_nothing_that_lasts(run: Run) -> None:
    support = await run.push("tenant-admin", "support", "good", ttl_s=0)
    denied = (
        "PERMISSION_DENIED",
        "tenants/acme/adapters/support has revisions without a time to live: the role trainer changes only what "
        "trainers pushed; use another name",
    )
    assert await refused(run.push("trainer", "support", "bad")) == denied
    assert await refused(run.push("trainer", "support", "bad", alias="-")) == denied
    assert await refused(run.ask("trainer", "DeleteAdapter", pb.DeleteAdapterRequest(name="support"))) == denied
    for method, request in (
        ("SetAlias", pb.SetAliasRequest(adapter="support", alias="live")),
        ("ListAdapters", pb.ListAdaptersRequest()),
        ("GetAdapter", pb.GetAdapterRequest(name="support")),
        ("DownloadRevision", pb.DownloadRevisionRequest(name=support.revision.name)),
    ):
        answer = getattr(run.stub, method)(request, metadata=run.bearer("trainer"))
        code, _ = await refused(answer.read() if method == "DownloadRevision" else answer)
        assert code == "PERMISSION_DENIED", method
    kept = await run.ask("tenant-admin", "GetAdapter", pb.GetAdapterRequest(name="support"))
    assert kept.revision == support.revision


async def test_an_alias_that_is_to_be_kept_refuses_other_bytes(run: Run) -> None:
    first = await run.push("trainer", "policy-v1", "step 1", keep_alias=True)
    again = await run.push("trainer", "policy-v1", "step 1", keep_alias=True)
    assert (again.created, again.revision.digest) == (False, first.revision.digest)
    code, message = await refused(run.push("trainer", "policy-v1", "step 2", keep_alias=True))
    assert code == "ALREADY_EXISTS"
    assert message.startswith(f"alias live means {first.revision.digest} already, not sha256:")
    listed = await run.ask("tenant-admin", "ListRevisions", pb.ListRevisionsRequest(parent=again.adapter.name))
    assert [one.digest for one in listed.revisions] == [first.revision.digest]
    moved = await run.push("trainer", "policy-v1", "step 2")
    assert moved.adapter.aliases == {"live": moved.revision.digest}
