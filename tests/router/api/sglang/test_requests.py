"""Requests of the engine protocol that have the same id: what tells them apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.api.sglang.requests import read_generate

pytest.importorskip("smg_grpc_proto", reason="the engine protocol's package is not installed: pip install '.[smg]'")

from smg_grpc_proto import sglang_scheduler_pb2 as pb


async def test_another_beginning_of_the_prompts_logprobs_is_another_request() -> None:
    models: Any = SimpleNamespace(get=lambda name: SimpleNamespace(manifest=SimpleNamespace(context_length=64)))

    async def fingerprint(**fields: Any) -> str:
        request = pb.GenerateRequest(request_id="r", tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]), **fields)
        return (await read_generate(request, "acme", "", models)).fingerprint

    found = [await fingerprint(return_logprob=True, logprob_start_len=start) for start in (-1, 0, 1, 1)]
    assert len(set(found)) == 3
    # A client that wants chunks takes over the same answer.
    assert await fingerprint(stream=True) == await fingerprint()
