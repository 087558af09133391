"""Revisions with a time to live: several beside each other, and what keeps one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import releases_pb2, releases_pb2_grpc

from loraplex.adapter_store.app import Store
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from tests.adapter_store.conftest import metadata

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client


def files(weights: str) -> dict[str, bytes]:
    return {CONFIG_FILE: b"{}", WEIGHTS_FILE: weights.encode()}


@pytest.fixture
async def ready(client: Client, hash_base: BaseModel) -> Client:
    """A client of a store that takes any adapter."""
    await client.register(hash_base)
    return client


async def gone(client: Client, name: str) -> None:
    """Wait until a name means nothing any more."""
    async with asyncio.timeout(60):
        while True:
            try:
                await client.get(name)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return
                raise
            await asyncio.sleep(0.05)


def end(store: Store, digest: str) -> None:
    """Let a revision's time have passed."""
    with store._database.transaction() as rows:
        assert rows.execute("UPDATE revisions SET expire_ns = 1 WHERE digest = ?", (digest,)).rowcount == 1


async def test_revisions_end_each_by_itself(ready: Client, store: Store) -> None:
    ttl = Duration(seconds=60)
    uploads = [await ready.upload("policy", files(f"step {step}"), alias="-", ttl=ttl) for step in range(3)]
    digests = [upload.revision.digest for upload in uploads]
    lives = [(await ready.get(f"policy@{digest}")).revision for digest in digests]
    spans = [one.expire_time.ToNanoseconds() - one.create_time.ToNanoseconds() for one in lives]
    assert spans == [60 * 10**9] * 3
    end(store, digests[0])
    await gone(ready, f"policy@{digests[0]}")
    assert (await ready.get(f"policy@{digests[1]}")).revision == lives[1]
    # For answers that run on it.
    assert (await ready.download(lives[0].name))[1] == files("step 0")
    end(store, digests[1])
    end(store, digests[2])
    await gone(ready, f"policy@{digests[2]}")
    assert not (await ready.call("ListAdapters", pb.ListAdaptersRequest(parent="tenants/acme"))).adapters


async def test_an_alias_a_release_and_an_upload_without_end_keep_a_revision(
    ready: Client, store: Store, data: Path
) -> None:
    ttl = Duration(seconds=60)
    named, released, kept, ended = [
        (await ready.upload("policy", files(name), alias="-", ttl=ttl)).revision
        for name in ("named", "released", "kept", "ended")
    ]
    await ready.call("SetAlias", pb.SetAliasRequest(adapter="policy", alias="best", digest=named.digest))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = releases_pb2_grpc.ReleaseServiceStub(channel)
        await stub.CreateRelease(releases_pb2.CreateReleaseRequest(revision=released.name), metadata=metadata("acme"))
    again = await ready.upload("policy", files("kept"), alias="-")
    assert (again.created, again.revision.HasField("expire_time")) == (False, False)
    for revision in (named, released, ended):
        end(store, revision.digest)
    await gone(ready, f"policy@{ended.digest}")
    for revision in (named, released, kept):
        assert (await ready.get(f"policy@{revision.digest}")).revision.digest == revision.digest


@pytest.mark.parametrize("seconds", [0, -5, 10**10])
async def test_a_time_that_is_none_is_refused(ready: Client, seconds: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ready.upload("policy", files("a"), ttl=Duration(seconds=seconds))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.value.details() or "").startswith("header.ttl: ")
