from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.contracts.artifacts.base_model import BaseModel, ModuleShape
from loraplex.contracts.artifacts.generation_config import GenerationConfig
from loraplex.contracts.artifacts.names import sha256_bytes

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]


async def download(client: Client, name: str) -> tuple[Any, dict[str, bytes]]:
    """A base model's manifest and files."""
    first, files = None, dict[str, bytes]()
    async for part in client.stub.DownloadBaseModel(pb.DownloadBaseModelRequest(name=name)):
        if part.WhichOneof("part") == "model":
            first = part.model
        else:
            files[part.chunk.name] = files.get(part.chunk.name, b"") + part.chunk.data
    return first, files


async def test_a_registered_model_comes_back_whole(client: Client, tiny_base: BaseModel) -> None:
    model = await client.register(tiny_base)
    assert [(file.name, file.size, file.sha256) for file in model.files] == [
        (name, len(data), sha256_bytes(data)) for name, data in sorted(tiny_base.files.items())
    ]
    assert [(m.name, m.in_features, m.out_features) for m in model.modules] == [
        ("model.layers.0.self_attn.q_proj", 8, 6)
    ]
    assert (model.context_length, model.vocab_size, list(model.end_token_ids)) == (64, 32, [2])
    got = await client.call("GetBaseModel", pb.GetBaseModelRequest(name="tiny"), tenant=None)
    assert got.model == model
    assert await download(client, "tiny") == (model, tiny_base.files)


async def test_registering_the_same_again_changes_nothing(client: Client, tiny_base: BaseModel) -> None:
    first = await client.register(tiny_base)
    assert await client.register(tiny_base) == first
    assert await client.register(tiny_base, replace=True) == first


async def test_fields_that_a_later_version_wrote_are_left_out(client: Client, tiny_base: BaseModel, data: Path) -> None:
    """They add to what the digest stands for: one that changes the model's answers changes the digest too."""
    registered = await client.register(tiny_base)
    catalog = sqlite3.connect(data / "catalog.db")
    catalog.execute("UPDATE base_models SET manifest = json_set(manifest, '$.of_a_later_version', json('[1]'))")
    catalog.commit()
    catalog.close()
    got = await client.call("GetBaseModel", pb.GetBaseModelRequest(name="tiny"), tenant=None)
    assert got.model == registered
    assert await client.register(tiny_base) == registered


def of_digest(base: BaseModel, digit: str) -> BaseModel:
    """A revision of a base model with a digest and a file of its own."""
    return dataclasses.replace(
        base, digest="sha256:" + digit * 64, files={"config.json": b'{"n": %s}' % digit.encode()}
    )


async def states(client: Client) -> dict[str, str]:
    """The first digit of each revision's digest, by state."""
    request = pb.ListBaseModelsRequest(all_revisions=True, page_size=1)
    found = dict[str, str]()
    while True:
        page = await client.call("ListBaseModels", request, tenant=None)
        found |= {model.state: model.digest[7] for model in page.models}
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


async def test_another_digest_needs_replace_or_stage(
    client: Client, tiny_base: BaseModel, refusal: Refusal, data: Path
) -> None:
    await client.register(of_digest(tiny_base, "1"))
    with pytest.raises(grpc.aio.AioRpcError, match=r"with digest sha256:1+, not sha256:2+; stage this one") as caught:
        await client.register(of_digest(tiny_base, "2"))
    assert refusal(caught.value)[:2] == ("ALREADY_EXISTS", "ErrorInfo")
    assert (await client.register(of_digest(tiny_base, "2"), replace=True)).state == "live"
    assert (await download(client, "tiny"))[1] == {"config.json": b'{"n": 2}'}
    assert await states(client) == {"live": "2", "former": "1"}
    await client.register(of_digest(tiny_base, "3"), replace=True)
    assert await states(client) == {"live": "3", "former": "2"}
    assert len(list((data / "blobs").iterdir())) == 2


async def promote(client: Client, digit: str) -> pb.BaseModel:
    request = pb.PromoteBaseModelRequest(name="tiny", digest="sha256:" + digit * 64)
    model: pb.BaseModel = (await client.call("PromoteBaseModel", request, tenant=None)).model
    return model


async def test_a_staged_revision_is_promoted_and_rolled_back(client: Client, tiny_base: BaseModel) -> None:
    first, second = of_digest(tiny_base, "1"), of_digest(tiny_base, "2")
    assert (await client.register(first, stage=True)).state == "live"  # there was none
    assert (await client.register(second, stage=True)).state == "staged"
    assert (await client.register(second, stage=True)).state == "staged"  # again changes nothing
    assert await states(client) == {"live": "1", "staged": "2"}
    for name, files in (("tiny", first.files), (f"tiny@{second.digest}", second.files)):
        assert (await download(client, name))[1] == files
    with pytest.raises(grpc.aio.AioRpcError, match="as a staged revision; promote it"):
        await client.register(second)
    assert (await promote(client, "2")).state == "live"
    assert (await promote(client, "2")).state == "live"
    assert await states(client) == {"live": "2", "former": "1"}
    assert (await download(client, "tiny"))[1] == second.files
    await promote(client, "1")
    assert await states(client) == {"live": "1", "former": "2"}
    with pytest.raises(grpc.aio.AioRpcError, match=r"not found: tiny@sha256:9+"):
        await promote(client, "9")


async def test_the_live_the_former_and_the_last_staged_revision_are_kept(
    client: Client, tiny_base: BaseModel, data: Path
) -> None:
    for digit in "12":
        await client.register(of_digest(tiny_base, digit), replace=True)
    for digit in "345":
        await client.register(of_digest(tiny_base, digit), stage=True)
    assert await states(client) == {"former": "1", "live": "2", "staged": "5"}
    assert len(list((data / "blobs").iterdir())) == 3
    for digit in "56":
        await client.register(of_digest(tiny_base, digit), stage=True)
        await promote(client, digit)
    assert await states(client) == {"former": "5", "live": "6"}


async def test_other_small_files_need_replace_too(client: Client, tiny_base: BaseModel) -> None:
    await client.register(tiny_base)
    other = dataclasses.replace(tiny_base, files={**tiny_base.files, "chat_template.jinja": b"{{ x }}"})
    with pytest.raises(grpc.aio.AioRpcError, match="other small files"):
        await client.register(other)
    await client.register(other, replace=True)
    assert (await download(client, "tiny"))[1] == other.files


async def test_a_model_that_was_registered_without_its_experts_learns_of_them(
    client: Client, tiny_base: BaseModel
) -> None:
    experts = ModuleShape("model.layers.0.mlp.experts.down_proj", 4, 8, 16)
    whole = dataclasses.replace(tiny_base, modules=(*tiny_base.modules, experts))
    for manifest, modules in ((tiny_base, tiny_base.modules), (whole, whole.modules), (tiny_base, whole.modules)):
        registered = await client.register(manifest)
        shapes = [(one.name, one.in_features, one.out_features, one.experts) for one in registered.modules]
        assert shapes == [dataclasses.astuple(one) for one in modules]
    other = dataclasses.replace(whole, modules=whole.modules[1:])
    with pytest.raises(grpc.aio.AioRpcError, match="another manifest"):
        await client.register(other)


async def test_a_mask_chooses_fields(client: Client, tiny_base: BaseModel) -> None:
    await client.register(tiny_base)
    mask = FieldMask(paths=["digest", "architecture"])
    got = await client.call("GetBaseModel", pb.GetBaseModelRequest(name="tiny", read_mask=mask), tenant=None)
    assert got.model == pb.BaseModel(digest=tiny_base.digest, architecture="llama")
    mask = FieldMask(paths=["colour"])
    with pytest.raises(grpc.aio.AioRpcError, match="read_mask: colour"):
        await client.call("GetBaseModel", pb.GetBaseModelRequest(name="tiny", read_mask=mask), tenant=None)


async def test_unknown_models_are_not_found(client: Client, refusal: Refusal) -> None:
    for call in (
        client.call("GetBaseModel", pb.GetBaseModelRequest(name="gone"), tenant=None),
        download(client, "gone"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert refusal(caught.value)[:2] == ("NOT_FOUND", "ErrorInfo,ResourceInfo")


async def test_models_are_listed_in_pages(client: Client, hash_base: BaseModel) -> None:
    names = sorted(f"model-{number}" for number in range(5))
    for name in names:
        await client.register(dataclasses.replace(hash_base, name=name))
    first = await client.call("ListBaseModels", pb.ListBaseModelsRequest(page_size=3), tenant=None)
    token = first.next_page_token
    rest = await client.call("ListBaseModels", pb.ListBaseModelsRequest(page_size=3, page_token=token), tenant=None)
    assert [model.name for model in (*first.models, *rest.models)] == names
    assert (len(first.models), rest.next_page_token) == (3, "")


async def test_pages_of_large_manifests_end_early(client: Client, tiny_base: BaseModel) -> None:
    modules = tuple(ModuleShape(f"{layer}_{'x' * 1000}", 8, 8) for layer in range(1900))
    names = ["a", "b", "c"]
    for name in names:
        await client.register(dataclasses.replace(tiny_base, name=name, modules=modules, files={}))
    token = ""
    for name in names:
        page = await client.call("ListBaseModels", pb.ListBaseModelsRequest(page_token=token), tenant=None)
        assert [model.name for model in page.models] == [name]
        token = page.next_page_token
    assert token == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a/b/c"}, "model.name: 'a/b/c' is not allowed"),
        ({"digest": "sha256:1"}, "model.digest: "),
        ({"architecture": ""}, "model.architecture: "),
        ({"context_length": 0}, "model.context_length: is missing"),
        ({"vocab_size": 0}, "model.vocab_size: is missing"),
        ({"end_token_ids": (2, 32)}, "model.end_token_ids[1]: 32 is not in a vocabulary of 32"),
        ({"modules": (ModuleShape("a..b", 1, 1),)}, "model.modules[0].name: "),
        ({"modules": (ModuleShape("a", 1, 1), ModuleShape("a", 1, 1))}, "model.modules[1].name: "),
        ({"modules": (ModuleShape("a", 0, 1),)}, "model.modules[0]: a has no in_features"),
        ({"files": {"../config.json": b""}}, "chunk.name: '../config.json' is not a plain file name"),
        ({"files": {".": b""}}, "chunk.name: "),
        ({"files": {f"{number}.json": b"" for number in range(65)}}, "chunk.name: these are more than 64 files"),
    ],
)
async def test_bad_registrations_name_the_field(
    client: Client, tiny_base: BaseModel, uploads_gone: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.register(dataclasses.replace(tiny_base, **changes))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(message)
    await uploads_gone()


async def test_registrations_out_of_order_are_refused(client: Client, hash_base: BaseModel) -> None:
    chunk = pb.RegisterBaseModelRequest(chunk=pb.FileChunk(name="config.json"))
    model = await client.register(hash_base)
    header = pb.RegisterBaseModelRequest(model=model)
    for parts, message in (([], "comes first"), ([chunk], "comes first"), ([header, header], "comes once, first")):
        with pytest.raises(grpc.aio.AioRpcError, match=message):
            await client.stub.RegisterBaseModel(iter(parts))


async def test_announced_files_must_arrive(client: Client, tiny_base: BaseModel) -> None:
    described = await client.register(tiny_base)
    described.name = "again"
    header = pb.RegisterBaseModelRequest(model=described)

    def chunks(*names: str) -> list[pb.RegisterBaseModelRequest]:
        return [
            pb.RegisterBaseModelRequest(chunk=pb.FileChunk(name=name, data=tiny_base.files[name][:1000]))
            for name in names
        ]

    for parts in (chunks("config.json", "empty.json"), chunks(*tiny_base.files)):
        with pytest.raises(grpc.aio.AioRpcError, match=r"model\.files: tokenizer\.json did not arrive"):
            await client.stub.RegisterBaseModel(iter([header, *parts]))
    small = dataclasses.replace(tiny_base, files={"config.json": b"{}"}, name="small")
    described = await client.register(small)
    parts = [pb.RegisterBaseModelRequest(chunk=pb.FileChunk(name="config.json", data=b"{}"))]
    again = await client.stub.RegisterBaseModel(iter([pb.RegisterBaseModelRequest(model=described), *parts]))
    assert again.model == described


async def test_files_together_have_a_limit(client: Client, hash_base: BaseModel, uploads_gone: Any) -> None:
    files = {f"{number}.json": b"x" * (33 * 1024 * 1024) for number in range(2)}
    with pytest.raises(grpc.aio.AioRpcError, match="all files together are larger than the 67108864 bytes"):
        await client.register(dataclasses.replace(hash_base, files=files))
    await uploads_gone()


async def test_adapters_stay_valid_where_a_quantized_model_replaces_its_original(
    client: Client, tiny_base: BaseModel, adapter_files: Callable[..., dict[str, bytes]]
) -> None:
    await client.register(tiny_base)
    before = (await client.upload("before", adapter_files(), alias="live")).revision
    quantized = dataclasses.replace(
        tiny_base,
        digest="sha256:" + "2" * 64,
        quantization="int4-calibrated-4.75",
        original_digest=tiny_base.digest,
        kv_cache_dtype="int8",
    )
    model = await client.register(quantized, replace=True)
    found = (model.quantization, model.original_digest, model.kv_cache_dtype)
    assert found == ("int4-calibrated-4.75", tiny_base.digest, "int8")
    after = (await client.upload("after", adapter_files(), alias="live")).revision
    assert before.base_digest == after.base_digest == tiny_base.digest


@pytest.mark.parametrize(
    "changes", [{"original_digest": "sha256:12"}, {"quantization": "int 8"}, {"kv_cache_dtype": "int 8"}]
)
async def test_bad_fields_of_a_quantized_model_are_refused(
    client: Client, tiny_base: BaseModel, changes: dict[str, Any]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"model.{next(iter(changes))}"):
        await client.register(dataclasses.replace(tiny_base, **changes))


CONFIG = GenerationConfig(do_sample=True, temperature=0.6, top_k=0, max_new_tokens=9)
GIVEN = pb.GenerationConfig(do_sample=True, temperature=0.6, top_k=0, max_new_tokens=9)


async def test_what_the_generation_config_says_is_kept(client: Client, tiny_base: BaseModel, data: Path) -> None:
    model = await client.register(dataclasses.replace(tiny_base, generation_config=CONFIG))
    assert model.generation_config == GIVEN
    with closing(sqlite3.connect(data / "catalog.db")) as catalog:
        sql = "UPDATE base_models SET manifest = json_set(manifest, '$.generation_config.of_a_later_version', 1)"
        catalog.execute(sql)
        catalog.commit()
    assert (await download(client, "tiny"))[0].generation_config == GIVEN


async def test_the_same_files_complete_what_an_earlier_version_has_registered(
    client: Client, tiny_base: BaseModel, data: Path
) -> None:
    """Such a version did not read the file; its clients still register the model, which changes nothing."""
    first = await client.register(tiny_base)
    with closing(sqlite3.connect(data / "catalog.db")) as catalog:
        catalog.execute("UPDATE base_models SET manifest = json_remove(manifest, '$.generation_config')")
        catalog.commit()
    assert not (await download(client, "tiny"))[0].HasField("generation_config")
    completed = await client.register(dataclasses.replace(tiny_base, generation_config=CONFIG))
    assert (completed.generation_config, completed.digest, completed.state) == (GIVEN, first.digest, "live")
    assert await client.register(tiny_base) == completed
    staged = dataclasses.replace(tiny_base, digest="sha256:" + "2" * 64)
    await client.register(staged, stage=True)
    again = await client.register(dataclasses.replace(staged, generation_config=CONFIG), stage=True)
    assert (again.generation_config, again.state) == (GIVEN, "staged")


@pytest.mark.parametrize(
    "config", [{"temperature": -1.0}, {"top_p": float("nan")}, {"min_p": 1e300}, {"max_new_tokens": 0}]
)
async def test_a_bad_generation_config_is_refused_by_its_field(
    client: Client, tiny_base: BaseModel, config: dict[str, Any]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"model.generation_config.{next(iter(config))}"):
        await client.register(dataclasses.replace(tiny_base, generation_config=GenerationConfig(**config)))
