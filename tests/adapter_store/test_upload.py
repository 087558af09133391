from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.names import sha256_bytes
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE, revision_digest

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

ANY = {CONFIG_FILE: b"{}", WEIGHTS_FILE: b"weights"}
Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]


def header(adapter: str = "support", **fields: Any) -> pb.UploadRevisionRequest:
    return pb.UploadRevisionRequest(header=pb.UploadHeader(adapter=adapter, **fields))


def chunk(name: str, data: bytes = b"x") -> pb.UploadRevisionRequest:
    return pb.UploadRevisionRequest(chunk=pb.FileChunk(name=name, data=data))


async def test_what_goes_up_comes_down(client: Client, hash_base: BaseModel) -> None:
    await client.register(hash_base)
    weights = random.Random(5).randbytes(3 * 1024 * 1024 + 17)
    files = {CONFIG_FILE: b'{"r": 8, "peft_type": "LORA"}', WEIGHTS_FILE: weights}
    uploaded = await client.upload("support", files, base_model="hash")
    digest = revision_digest(files[CONFIG_FILE], sha256_bytes(weights))
    revision = uploaded.revision
    assert uploaded.created
    assert uploaded.adapter.name == "tenants/acme/adapters/support"
    assert dict(uploaded.adapter.aliases) == {"live": digest}
    assert revision.name == f"tenants/acme/adapters/support/revisions/{digest}"
    assert (revision.digest, revision.rank, revision.weight_bytes) == (digest, 8, len(weights))
    assert (revision.base_model, revision.base_digest) == ("hash", hash_base.digest)
    assert await client.download(revision.name) == (revision, files)
    assert (await client.get("support")).revision == revision


async def test_the_same_bytes_again_are_the_same_revision(client: Client, hash_base: BaseModel, data: Path) -> None:
    await client.register(hash_base)
    first = await client.upload("support", {CONFIG_FILE: b'{"r": 8, "x": 1}', WEIGHTS_FILE: b"w"})
    again = await client.upload("support", {CONFIG_FILE: b'{"x":1, "r":8}', WEIGHTS_FILE: b"w"}, alias="canary")
    assert (first.created, again.created) == (True, False)
    assert again.revision == first.revision
    assert dict(again.adapter.aliases) == {"live": first.revision.digest, "canary": first.revision.digest}
    assert (await client.download(first.revision.name))[1][CONFIG_FILE] == b'{"r": 8, "x": 1}'
    assert len(list((data / "blobs").iterdir())) == 2


async def test_uploads_of_the_same_bytes_at_once_make_one_revision(client: Client, hash_base: BaseModel) -> None:
    await client.register(hash_base)
    answers = await asyncio.gather(*(client.upload("support", ANY) for _ in range(16)))
    assert sum(answer.created for answer in answers) == 1
    revisions = await client.call("ListRevisions", pb.ListRevisionsRequest(parent="support"))
    assert len(revisions.revisions) == 1


async def test_an_upload_need_not_move_an_alias(client: Client, hash_base: BaseModel) -> None:
    await client.register(hash_base)
    uploaded = await client.upload("support", ANY, alias="-")
    assert not uploaded.adapter.aliases
    assert (await client.get(f"support@{uploaded.revision.digest}")).revision == uploaded.revision


async def test_another_base_models_name_is_a_warning(client: Client, tiny_base: BaseModel, adapter_files: Any) -> None:
    await client.register(tiny_base)
    (warning,) = (await client.upload("a", adapter_files(1, base_model_name_or_path="/models/Other-7B"))).warnings
    assert "'/models/Other-7B': its shapes fit tiny" in warning
    for name in ("tiny", "org/Tiny", "/models/tiny/", None):
        assert not (await client.upload("b", adapter_files(2, base_model_name_or_path=name))).warnings


async def test_validate_checks_and_keeps_nothing(client: Client, tiny_base: BaseModel, adapter_files: Any) -> None:
    await client.register(tiny_base)

    async def validate(files: dict[str, bytes]) -> Any:
        parts = [pb.ValidateAdapterRequest(header=pb.UploadHeader(adapter="support"))]
        parts += [pb.ValidateAdapterRequest(chunk=pb.FileChunk(name=name, data=files[name])) for name in files]
        return await client.call("ValidateAdapter", iter(parts))

    good = adapter_files()
    revision = (await validate(good)).revision
    assert revision.digest == revision_digest(good[CONFIG_FILE], sha256_bytes(good[WEIGHTS_FILE]))
    assert (revision.rank, revision.base_digest) == (2, tiny_base.digest)
    with pytest.raises(grpc.aio.AioRpcError, match="lora_bias"):
        await validate(adapter_files(lora_bias=True))
    assert not (await client.call("ListAdapters", pb.ListAdaptersRequest())).adapters


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        ({"lora_bias": True}, "FAILED_PRECONDITION", "lora_bias: biases"),
        ({"modules_to_save": ["norm"]}, "FAILED_PRECONDITION", "modules_to_save: "),
        ({"use_dora": True}, "INVALID_ARGUMENT", "adapter_model.safetensors: tensor base_model.model.model.layers.0."),
        ({"r": 3}, "INVALID_ARGUMENT", "adapter_model.safetensors: model.layers.0.self_attn.q_proj has rank 2, but"),
        ({"r": "two"}, "INVALID_ARGUMENT", "r: 'two' is not a rank"),
    ],
)
async def test_refused_configs_name_the_field(
    client: Client,
    tiny_base: BaseModel,
    adapter_files: Any,
    refusal: Refusal,
    config: dict[str, Any],
    code: str,
    message: str,
) -> None:
    await client.register(tiny_base)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.upload("support", adapter_files(**config))
    kinds = {"FAILED_PRECONDITION": "ErrorInfo,PreconditionFailure", "INVALID_ARGUMENT": "ErrorInfo,BadRequest"}
    assert refusal(caught.value)[:2] == (code, kinds[code])
    assert str(caught.value.details()).startswith(message)


BROKEN = [
    ([], "header: comes first"),
    ([chunk(CONFIG_FILE)], "header: comes first"),
    ([header()], "chunk: adapter_config.json is missing"),
    ([header(), chunk(CONFIG_FILE)], "chunk: adapter_model.safetensors is missing"),
    ([header(), chunk(CONFIG_FILE), header()], "header: comes once"),
    ([header(), pb.UploadRevisionRequest()], "header: comes once"),
    ([header(), chunk("README.md")], "chunk.name: 'README.md' is not a file of an adapter"),
    ([header(), chunk("../adapter_config.json")], "chunk.name: "),
    (
        [header(), chunk(CONFIG_FILE), chunk(WEIGHTS_FILE), chunk(CONFIG_FILE)],
        "chunk.name: adapter_config.json goes on",
    ),
    ([header(), chunk(WEIGHTS_FILE, b"x" * (1024 * 1024 + 1))], "chunk.data: has 1048577 bytes"),
    ([header(), *[chunk(CONFIG_FILE, b"x" * 600_000)] * 2], "adapter_config.json: is larger than the 1048576"),
    (
        [header(), *[chunk(WEIGHTS_FILE, b"x" * 1024 * 1024)] * 5],
        "adapter_model.safetensors: is larger than the 4194304",
    ),
    ([header("Support!")], "header.adapter: 'Support!' is not allowed"),
    ([header("tenants/acme/support")], "header.adapter: "),
    ([header("support@live")], "header.adapter: "),
    ([header(alias="NEW")], "header.alias: "),
    *(([header(name)], f"header.adapter: {name} means the base model over HTTP") for name in ("hash", "tgi", "dummy")),
]


@pytest.mark.parametrize(("parts", "message"), BROKEN)
async def test_broken_uploads_are_refused_and_leave_nothing(
    client: Client, hash_base: BaseModel, data: Path, uploads_gone: Any, parts: list[Any], message: str
) -> None:
    await client.register(hash_base)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call("UploadRevision", iter(parts))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(message)
    await uploads_gone()
    assert not list((data / "blobs").iterdir())


async def test_an_upload_that_breaks_off_leaves_nothing(
    client: Client, hash_base: BaseModel, data: Path, uploads_gone: Any
) -> None:
    await client.register(hash_base)
    for parts_before in range(1, 4):
        call = client.stub.UploadRevision(metadata=(("x-loraplex-tenant", "acme"),))
        for part in [header(), chunk(CONFIG_FILE), chunk(WEIGHTS_FILE)][:parts_before]:
            await call.write(part)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await uploads_gone()
    assert not (await client.call("ListAdapters", pb.ListAdaptersRequest())).adapters
    assert not list((data / "blobs").iterdir())


async def test_a_client_that_vanishes_in_mid_upload_leaves_nothing(
    client: Client, connect: Any, hash_base: BaseModel, upload_begun: Any, uploads_gone: Any, store: Any
) -> None:
    await client.register(hash_base)
    other = connect(f"127.0.0.1:{store.port}")
    call = other.stub.UploadRevision(metadata=(("x-loraplex-tenant", "acme"),))
    await call.write(header())
    await call.write(chunk(WEIGHTS_FILE, b"x" * 1024 * 1024))
    await upload_begun()
    await other.close()
    await uploads_gone()


async def test_weights_that_are_cut_short_are_refused(client: Client, tiny_base: BaseModel, adapter_files: Any) -> None:
    await client.register(tiny_base)
    files = adapter_files()
    files[WEIGHTS_FILE] = files[WEIGHTS_FILE][:-1]
    with pytest.raises(grpc.aio.AioRpcError, match=r"adapter_model\.safetensors: is cut short"):
        await client.upload("support", files)


async def test_the_base_model_must_be_known_and_clear(
    client: Client, hash_base: BaseModel, tiny_base: BaseModel, refusal: Refusal
) -> None:
    async def refused(**fields: str) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.upload("support", ANY, **fields)
        return refusal(caught.value)[0], str(caught.value.details())

    assert await refused() == ("NOT_FOUND", "base model not found: none is registered")
    await client.register(hash_base)
    assert await refused(base_model="gone") == ("NOT_FOUND", "base model not found: gone")
    await client.upload("support", ANY)
    await client.register(tiny_base)
    assert (await refused())[0] == "INVALID_ARGUMENT"
    code, message = await refused(base_model="tiny")
    assert code == "FAILED_PRECONDITION"
    assert (
        message == "base_model: tenants/acme/adapters/support belongs to base model hash, not to tiny; use another name"
    )


async def test_a_stale_etag_is_refused_before_the_files_come(client: Client, hash_base: BaseModel) -> None:
    await client.register(hash_base)
    etag = (await client.upload("support", ANY)).adapter.etag
    other = {CONFIG_FILE: b'{"r": 2}', WEIGHTS_FILE: b"w"}
    newer = (await client.upload("support", other, etag=etag)).adapter.etag
    assert newer != etag

    async def refused(adapter: str, stale: str) -> grpc.StatusCode:
        call = client.stub.UploadRevision(metadata=(("x-loraplex-tenant", "acme"),))
        await call.write(header(adapter, etag=stale))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code()

    # At once: each refusal waits for files that do not come.
    codes = await asyncio.gather(refused("support", etag), refused("unknown", newer))
    assert set(codes) == {grpc.StatusCode.ABORTED}


async def test_an_etag_that_turns_stale_during_the_upload_is_refused(client: Client, hash_base: BaseModel) -> None:
    await client.register(hash_base)
    etag = (await client.upload("support", ANY)).adapter.etag
    overtaken = asyncio.Event()

    async def slowly() -> AsyncIterator[pb.UploadRevisionRequest]:
        yield header(etag=etag)
        yield chunk(CONFIG_FILE, b'{"r": 3}')
        await overtaken.wait()
        yield chunk(WEIGHTS_FILE)

    slow = asyncio.create_task(client.call("UploadRevision", slowly()))
    live = (await client.upload("support", {CONFIG_FILE: b'{"r": 2}', WEIGHTS_FILE: b"w"}, etag=etag)).revision
    overtaken.set()
    with pytest.raises(grpc.aio.AioRpcError, match="has changed since"):
        await slow
    assert (await client.get("support")).revision == live


async def test_a_base_that_is_replaced_during_the_upload_is_noticed(client: Client, tiny_base: BaseModel) -> None:
    import dataclasses

    base = dataclasses.replace(tiny_base, architecture="hash")
    await client.register(base)
    replaced = asyncio.Event()

    async def slowly() -> AsyncIterator[pb.UploadRevisionRequest]:
        yield header()
        yield chunk(CONFIG_FILE)
        await replaced.wait()
        yield chunk(WEIGHTS_FILE)

    slow = asyncio.create_task(client.call("UploadRevision", slowly()))
    await client.upload("other", ANY)  # by now the slow one's header has arrived too, or it meets the new base
    for digit in "32":  # twice: the former revision stays, and uploads for it are kept
        other = dataclasses.replace(base, digest="sha256:" + digit * 64)
        await client.register(other, replace=True)
    replaced.set()
    try:
        assert (await slow).revision.base_digest == other.digest
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.ABORTED  # noqa: PT017  # one of two good outcomes
    old = (await client.get("other")).revision
    assert old.base_digest == base.digest
    again = await client.upload("other", ANY)
    assert (again.created, again.revision.digest) == (False, old.digest)
    assert again.revision.base_digest == other.digest


async def test_config_may_be_spaced_as_it_likes(client: Client, tiny_base: BaseModel, adapter_files: Any) -> None:
    await client.register(tiny_base)
    files = adapter_files()
    first = await client.upload("support", files)
    spaced = files | {CONFIG_FILE: json.dumps(json.loads(files[CONFIG_FILE]), indent=4).encode()}
    assert (await client.upload("support", spaced)).revision.digest == first.revision.digest
