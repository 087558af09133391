"""Uploads that are made to exhaust the store: each ends with one status, and another tenant's upload goes through."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.app import StoreSettings
from loraplex.adapter_store.open_calls import OpenUploads
from loraplex.contracts.artifacts.base_model import BaseModel, ModuleShape
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.rpc.errors import CallError

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

TENANT = (("x-loraplex-tenant", "mallory"),)
MODULES = [f"model.layers.{layer}.self_attn_{'x' * 40}.{name}_proj" for layer in range(80) for name in "qkvoudg"]


def adapter(header: bytes, data: bytes = b"", **config: Any) -> dict[str, bytes]:
    fields = {"peft_type": "LORA", "r": 1} | config
    return {CONFIG_FILE: json.dumps(fields).encode(), WEIGHTS_FILE: struct.pack("<Q", len(header)) + header + data}


def of_all_modules(**config: Any) -> dict[str, bytes]:
    """Return an adapter of every module, of rank 1."""
    header: dict[str, Any] = {}
    for name in MODULES:
        for part in ("A", "B"):
            at = [4 * len(header), 4 * len(header) + 4]
            header[f"base_model.model.{name}.lora_{part}.weight"] = {
                "dtype": "F32",
                "shape": [1, 1],
                "data_offsets": at,
            }
    return adapter(json.dumps(header).encode(), bytes(4 * len(header)), **config)


HOSTILE = {
    "a header of 15 MB": (adapter(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"), "a header at most 4194304"),
    "a header longer than the file": (
        adapter(b"{}") | {WEIGHTS_FILE: b"\xff" * 9},
        "header would be 18446744073709551615",
    ),
    "two million lists": (
        adapter(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"),
        "more than [0-9]+ values",
    ),
    "lists in lists": (adapter(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "a number of a million digits": (adapter(b'{"a":' + b"9" * 1_000_000 + b"}"), "not valid JSON"),
    "256 patterns": (of_all_modules(rank_pattern={f".*.*{i}": 1 for i in range(256)}), "takes too long"),
}


@pytest.fixture
def store_settings(data: Path) -> StoreSettings:
    return StoreSettings(data=data, port=0, max_adapter_bytes=64 * 1024 * 1024)


@pytest.fixture
def wide_base(tiny_base: BaseModel) -> BaseModel:
    """A base with 560 tiny layers of long names."""
    return replace(tiny_base, modules=tuple(ModuleShape(name, 1, 1) for name in MODULES), files={})


async def test_hostile_files_end_with_one_line_while_others_are_served(client: Client, wide_base: BaseModel) -> None:
    await client.register(wide_base)

    async def refused(name: str) -> None:
        files, words = HOSTILE[name]
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await client.upload("bad", files, tenant="mallory")
        assert caught.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}, name
        assert "\n" not in str(caught.value.details())

    attacks = [asyncio.create_task(refused(name)) for name in HOSTILE]
    good = of_all_modules(rank_pattern={".*q_proj": 1})
    assert (await client.upload("good", good, tenant="acme")).created
    await asyncio.gather(*attacks)
    kept = (await client.download((await client.get("good")).revision.name))[1]
    assert json.loads(kept[CONFIG_FILE])["rank_pattern"] == {}
    assert not (await client.upload("good", kept, tenant="acme")).created


async def test_half_open_uploads_are_refused_beyond_a_tenants_share(client: Client, hash_base: BaseModel) -> None:
    await client.register(hash_base)
    before = len(os.listdir("/proc/self/fd"))
    calls = [client.stub.UploadRevision(metadata=TENANT) for _ in range(120)]

    async def begin(call: Any) -> None:
        try:
            await call.write(pb.UploadRevisionRequest(header=pb.UploadHeader(adapter="half")))
            await call.write(pb.UploadRevisionRequest(chunk=pb.FileChunk(name=CONFIG_FILE, data=b"{")))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # refused already

    await asyncio.gather(*map(begin, calls))
    ends = asyncio.as_completed([call.code() for call in calls])
    for _ in range(120 - 32):
        assert await next(ends) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(os.listdir("/proc/self/fd")) < before + 80
    assert (await client.upload("whole", {CONFIG_FILE: b"{}", WEIGHTS_FILE: b"w"})).created
    for call in calls:
        call.cancel()


async def test_an_upload_that_stops_or_drips_ends() -> None:
    async def dripping() -> AsyncIterator[pb.UploadRevisionRequest]:
        while True:
            await asyncio.sleep(0.01)
            yield pb.UploadRevisionRequest(chunk=pb.FileChunk(data=b"x"))

    async def read_all() -> None:
        async with uploads.one(dripping(), "acme") as parts:
            async for _ in parts:
                pass

    uploads = OpenUploads(2, silent_s=0.05)
    with pytest.raises(CallError, match="less than 65536 bytes a second") as caught:
        await read_all()
    assert caught.value.reason == "UPLOAD_TOO_SLOW"
    async with uploads.one(dripping(), "acme"):
        with pytest.raises(CallError, match="its share of the 2 uploads"):
            await read_all()
        async with uploads.one(dripping(), "globex") as parts:
            assert (await anext(parts)).chunk.data == b"x"
