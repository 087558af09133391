"""Lists of tenants with thousands of aliases and certificates: what they read, and who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.convert import adapter_to_pb, decode_token, fill_page
from loraplex.adapter_store.records import Adapter, Statement
from loraplex.adapter_store.service import Lists
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.names import AdapterName
from tests.adapter_store.conftest import CONFIG, WEIGHTS


def test_a_page_reads_no_more_than_it_takes() -> None:
    read: list[int] = []

    def records() -> Generator[int, None, None]:
        for number in range(100):
            read.append(number)
            yield number

    def convert(number: int) -> pb.Adapter:
        return pb.Adapter(name=f"{number}" + "x" * 1_000_000)

    page, token = fill_page(records(), convert, lambda number: (number,), 50)
    assert len(page) == len(read) - 1 == 3
    assert decode_token(token, (0,)) == [2]
    assert fill_page(range(3), convert, lambda number: (number,), 3)[1] == ""


async def test_a_revision_is_read_with_its_own_certificates_alone(
    client: Any, hash_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.register(hash_base)
    for number in range(4):
        await client.upload("support", {CONFIG: b"{}", WEIGHTS: b"weights %d" % number})
    page = await client.call("ListRevisions", pb.ListRevisionsRequest(parent="support"))
    for revision in page.revisions:
        certificate = pb.FitnessCertificate(
            quantization="int8", base_digest=revision.base_digest, prompts=1, tokens=1, agreement=1
        )
        await client.call("CertifyRevision", pb.CertifyRevisionRequest(name=revision.name, certificate=certificate))
    made: list[Statement[Any]] = []

    def counted(*fields: Any) -> Statement[Any]:
        made.append(Statement(*fields))
        return made[-1]

    monkeypatch.setattr("loraplex.adapter_store.records.Statement", counted)
    await client.call("GetAdapter", pb.GetAdapterRequest(name="support"))
    assert len(made) == 1
    await client.call("ListRevisions", pb.ListRevisionsRequest(parent="support", page_size=2))
    assert len(made) <= 1 + 3


async def test_lists_of_one_tenant_take_turns_with_those_of_another() -> None:
    order: list[str] = []
    may_read = threading.Event()

    def adapters(tenant: str) -> Generator[Adapter, None, None]:
        may_read.wait(60)
        order.append(tenant)
        yield Adapter(AdapterName(tenant, "support"), "hash", {}, 0, 0, "1-0")

    lists = Lists()

    async def ask(tenant: str) -> object:
        return await lists.page(tenant, partial(adapters, tenant), adapter_to_pb, lambda adapter: (adapter.etag,), 1)

    asked = [asyncio.create_task(ask(tenant)) for tenant in (*["acme"] * 4, "globex")]
    await asyncio.sleep(0)
    may_read.set()
    await asyncio.gather(*asked)
    assert order == ["acme", "acme", "globex", "acme", "acme"]
