"""A worker waits for the model that is registered under its name, and goes on with no other one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.worker.io import membership
from loraplex.worker.io.membership import wait_until_registered

PLAIN = replace(read_base_model("hash:?"), name="tiny")
INT8 = replace(PLAIN, digest="sha256:8", quantization="int8", original_digest=PLAIN.digest)
INT4 = replace(PLAIN, digest="sha256:4", quantization="int4", original_digest=PLAIN.digest)
KV8 = replace(INT8, digest="sha256:88", kv_cache_dtype="int8")
OTHER = replace(PLAIN, digest="sha256:other")


class Store:
    """Has one model, the first one live."""

    def __init__(self, *revisions: BaseModel) -> None:
        self._revisions = list[pb.BaseModel]()
        for base in revisions:
            self.stage(base)

    def stage(self, base: BaseModel) -> None:
        """Keep a further revision."""
        model = pb.BaseModel(
            name=base.name,
            digest=base.digest,
            quantization=base.quantization,
            original_digest=base.original_digest,
            kv_cache_dtype=base.kv_cache_dtype,
        )
        self._revisions.append(model)

    async def GetBaseModel(self, request: pb.GetBaseModelRequest, timeout: float) -> pb.GetBaseModelResponse:  # noqa: ASYNC109
        """See the service."""
        digest = request.name.partition("@")[2]
        for model in self._revisions:
            if digest in {model.digest, ""}:
                return pb.GetBaseModelResponse(model=model)
        raise grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata())


async def register(registered: BaseModel, own: BaseModel, *others: BaseModel) -> None:
    store: Any = Store(registered, *others)
    await wait_until_registered(store, own)


@pytest.mark.parametrize("base", [PLAIN, INT8, KV8])
async def test_the_same_model_is_served(base: BaseModel) -> None:
    await register(base, base)


async def test_a_revision_that_is_not_live_is_served() -> None:
    await register(PLAIN, OTHER, replace(OTHER, name=PLAIN.name))


@pytest.mark.parametrize(
    ("registered", "own", "message"),
    [
        (INT8, PLAIN, "it is registered with --quantize int8, this worker runs without --quantize; give both the same"),
        (PLAIN, INT4, "it is registered without --quantize, this worker runs with --quantize int4; give both the same"),
        (
            INT8,
            INT4,
            "it is registered with --quantize int8, this worker runs with --quantize int4; give both the same",
        ),
        (
            KV8,
            INT8,
            "it is registered with --kv-cache-dtype int8, this worker runs without --kv-cache-dtype; give both the",
        ),
        (
            PLAIN,
            KV8,
            "it is registered without --quantize and without --kv-cache-dtype, "
            "this worker runs with --quantize int8 and with --kv-cache-dtype int8; give both the same",
        ),
        # By a store that does not know the field.
        (replace(KV8, kv_cache_dtype=""), INT8, "the store has sha256:88 under this name, this worker's files are"),
        (OTHER, INT8, "the store has sha256:other under this name, this worker's files are sha256:8; serve"),
    ],
)
async def test_another_one_is_waited_for_with_what_to_do(
    registered: BaseModel,
    own: BaseModel,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    said, store = asyncio.Event(), Store(registered)

    async def pause(_: float) -> None:
        said.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "sleep", pause)
    waiting = asyncio.create_task(wait_until_registered(cast(Any, store), own))
    await said.wait()
    assert f"waits for base model tiny: {message}" in caplog.text
    waiting.cancel()


async def test_a_revision_is_served_once_it_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "ASK_S", 0.0)
    store = Store(OTHER)
    waiting = asyncio.create_task(wait_until_registered(cast(Any, store), PLAIN))
    await asyncio.sleep(0)
    store.stage(PLAIN)
    await waiting
