"""Requests of the engine protocol: what tells those of one id apart, and fields that are too large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.engine_protocols.sglang_messages import engine_field_names, read_generate
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import InvalidField

pytest.importorskip("smg_grpc_proto", reason="the engine protocol's package is not installed: pip install '.[smg]'")

from smg_grpc_proto import sglang_scheduler_pb2 as pb

MODEL = SimpleNamespace(manifest=SimpleNamespace(context_length=64), default_max_tokens=lambda default: default)


async def test_another_beginning_of_the_prompts_logprobs_is_another_request() -> None:
    models: Any = SimpleNamespace(get=lambda name: MODEL)

    async def fingerprint(**fields: Any) -> str:
        request = pb.GenerateRequest(request_id="r", tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]), **fields)
        return (await read_generate(request, "acme", "", models, PromptTokenizer(1))).fingerprint

    found = [await fingerprint(return_logprob=True, logprob_start_len=start) for start in (-1, 0, 1, 1)]
    assert len(set(found)) == 3
    # A client that wants chunks takes over the same answer.
    assert await fingerprint(stream=True) == await fingerprint()


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("logit_bias", pb.SamplingParams(logit_bias={str(key): 1.0 for key in range(301)})),
        ("stop", pb.SamplingParams(stop=["a"] * 17)),
        ("stop_token_ids", pb.SamplingParams(stop_token_ids=[1] * 65)),
        ("input_ids", pb.SamplingParams(stop_token_ids=[1])),
    ],
)
async def test_a_field_with_too_many_values_is_refused_before_they_are_read(
    field: str, params: pb.SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*args: Any, **fields: Any) -> None:
        raise AssertionError("copied before its size is known")

    monkeypatch.setattr("loraplex.engine_protocols.sglang_messages.pb.GenerateSpec", copied)
    models: Any = SimpleNamespace(get=lambda name: MODEL)
    ids = [1] * 65 if field == "input_ids" else [1]
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params)
    with pytest.raises(InvalidField) as refused, engine_field_names():
        await read_generate(request, "acme", "", models, PromptTokenizer(1))
    assert refused.value.field == ("tokenized.input_ids" if field == "input_ids" else f"sampling_params.{field}")
