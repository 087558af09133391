"""Formats of requests: large ones are read in turns of the tenants, and each is kept for its tenant alone."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2 as pb

from grammars.build import json_grammar
from router.api import convert
from router.api.convert import forget_formats, read_format, read_request
from router.request import Request
from router.text.prompt_encoder import PromptEncoder
from router.text.text import HashText

MODELS: Any = SimpleNamespace(
    get=lambda name: SimpleNamespace(manifest=SimpleNamespace(context_length=64), text=HashText())
)


async def test_large_formats_of_one_tenant_delay_another_s_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    may_read = threading.Event()

    def read(spec: pb.GenerateSpec, tenant: str) -> tuple[str, str]:
        if threading.current_thread() is not threading.main_thread():  # which reads what a thread has read
            assert may_read.wait(10.0)
            order.append(tenant)
        return read_format(spec, tenant)

    monkeypatch.setattr(convert, "read_format", read)
    encoder = PromptEncoder(1)

    async def ask(tenant: str, number: int) -> None:
        spec = pb.GenerateSpec(prompt="x", regex="[a-z]" * 1_000 + str(number))
        assert (await convert.read_spec(spec, tenant, MODELS, encoder)).grammar

    asked = [asyncio.create_task(ask("loud", number)) for number in range(4)]
    asked.append(asyncio.create_task(ask("quiet", 0)))
    await asyncio.sleep(0)
    may_read.set()
    await asyncio.gather(*asked)
    assert order.index("quiet") <= 2


async def test_many_ids_of_a_prompt_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()

    def read(spec: pb.GenerateSpec, tenant: str) -> Request:
        threads.append(threading.get_ident())
        return read_request(spec, tenant)

    monkeypatch.setattr(convert, "read_request", read)
    for count in (10, 10_000):
        spec = pb.GenerateSpec(token_ids=pb.TokenIds(ids=range(count)))
        spec.prompt_options.truncate_to = 5
        assert (await convert.read_spec(spec, "acme", MODELS, PromptEncoder(1))).prompt == tuple(range(count))
    assert [ident == threading.get_ident() for ident in threads] == [True, False]


def test_a_format_that_one_tenant_has_asked_with_is_read_anew_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_formats()
    read: list[str] = []

    def counted(schema: str, *style: Any) -> str:
        read.append(schema)
        return json_grammar(schema, *style)

    monkeypatch.setattr("router.api.convert.json_grammar", counted)
    spec = pb.GenerateSpec(json_schema='{"const": "a secret"}')
    for tenant in ("acme", "globex", "acme"):
        read_format(spec, tenant)
    assert len(read) == 2
