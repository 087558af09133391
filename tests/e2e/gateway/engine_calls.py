"""Calls of the engine protocol by its own stubs."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from smg_grpc_proto import sglang_scheduler_pb2 as pb

from loraplex.runtime.rpc.status import DETAILS_KEY

PROMPT = [72, 105, 300]
NEUTRAL: dict[str, Any] = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "n": 1}


def asked(max_new_tokens: int = 12, /, *, params: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return a request."""
    sampling = pb.SamplingParams(**{**NEUTRAL, "max_new_tokens": max_new_tokens, **(params or {})})
    return pb.GenerateRequest(
        **{"tokenized": pb.TokenizedInput(input_ids=PROMPT), "logprob_start_len": -1, "sampling_params": sampling}
        | fields
    )


async def answers(stub: Any, request: Any) -> list[Any]:
    """Return the last message of each choice, of a request that wants no chunks."""
    return [message.complete async for message in stub.Generate(request)]


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return a call's status, and the field that its details name."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = Status.FromString(dict(caught.value.trailing_metadata() or ())[DETAILS_KEY]).details
    found = error_details_pb2.BadRequest()
    fields = [found.field_violations[0].field for detail in details if detail.Unpack(found)]
    return caught.value.code(), "".join(fields)
