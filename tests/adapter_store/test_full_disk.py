"""A store whose disk is full, on a real small disk: every call has a status, nothing is left half-written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from tests.small_disks import SmallDisk

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]
MIB = 1 << 20


@pytest.fixture
def data(small_disk: SmallDisk) -> Path:
    """The store's directory, on a disk of 4 MiB."""
    return small_disk(4 * MIB)


def files(mebibytes: float, letter: bytes) -> dict[str, bytes]:
    return {CONFIG_FILE: b"{}", WEIGHTS_FILE: letter * int(mebibytes * MIB)}


async def refused(call: Any, refusal: Refusal) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    code, kinds, raw = refusal(caught.value)
    assert (code, kinds) == ("RESOURCE_EXHAUSTED", "ErrorInfo,QuotaFailure,RetryInfo")
    info = details_pb2.ErrorInfo()
    assert Status.FromString(raw).details[0].Unpack(info)
    assert info.reason == "DISK_FULL"


async def test_an_upload_that_does_not_fit_leaves_nothing(
    client: Client, hash_base: BaseModel, data: Path, refusal: Refusal
) -> None:
    await client.register(hash_base)
    first = (await client.upload("first", files(1.5, b"1"))).revision
    await refused(client.upload("second", files(3, b"2")), refusal)
    assert not list((data / "uploads").iterdir())
    assert len(list((data / "blobs").iterdir())) == 2
    with pytest.raises(grpc.aio.AioRpcError, match="adapter not found"):
        await client.get("second")
    assert (await client.upload("third", files(1.5, b"3"))).created
    assert (await client.download(first.name))[1] == files(1.5, b"1")


async def test_a_deletion_makes_room_though_the_files_are_kept_for_a_while(
    client: Client, hash_base: BaseModel, refusal: Refusal
) -> None:
    await client.register(hash_base)
    first = (await client.upload("first", files(2.5, b"1"))).revision
    await client.call("DeleteAdapter", pb.DeleteAdapterRequest(name="first"))
    await client.download(first.name)
    await refused(client.upload("second", files(2.5, b"2")), refusal)
    assert (await client.upload("second", files(2.5, b"2"))).created
    with pytest.raises(grpc.aio.AioRpcError, match="revision not found"):
        await client.download(first.name)


async def test_a_catalog_that_cannot_be_written(
    client: Client, hash_base: BaseModel, data: Path, refusal: Refusal
) -> None:
    """Another program takes every byte: the catalog's commit fails, and no file is left of the upload."""
    await client.register(hash_base)
    first = (await client.upload("first", files(0.5, b"1"))).revision
    before = set((data / "blobs").iterdir())
    with (data / "another program's").open("wb", buffering=0) as other:
        try:
            while True:
                other.write(bytes(4096))
        except OSError:
            pass
        await refused(client.upload("second", {CONFIG_FILE: b"{}", WEIGHTS_FILE: b"2"}), refusal)
        calls = [
            client.call("SetAlias", pb.SetAliasRequest(adapter="first", alias=f"a{number}", digest=first.digest))
            for number in range(100)
        ]
        failures = [await asyncio.gather(call, return_exceptions=True) for call in calls]
        full = [failure for (failure,) in failures if isinstance(failure, grpc.aio.AioRpcError)]
        assert full, "the catalog's log had room for all of them"
        for failure in full:
            assert refusal(failure)[0] == "RESOURCE_EXHAUSTED"
        assert set((data / "blobs").iterdir()) == before
        assert (data / "reserve").exists()
        await client.call("DeleteAdapter", pb.DeleteAdapterRequest(name="first"))
        with pytest.raises(grpc.aio.AioRpcError, match="adapter not found"):
            await client.get("first")
        assert not before & set((data / "blobs").iterdir())
        await client.upload("second", {CONFIG_FILE: b"{}", WEIGHTS_FILE: b"2"})
    (data / "another program's").unlink()
    assert (await client.upload("third", {CONFIG_FILE: b"{}", WEIGHTS_FILE: b"3"})).created
