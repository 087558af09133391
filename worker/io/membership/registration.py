"""The check that the base model of this worker is the one that the store has under its name."""

from __future__ import annotations

import asyncio
import logging

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from artifacts.base_model import BaseModel
from artifacts.errors import MismatchError

log = logging.getLogger(__name__)

# Seconds between two questions to the store.
ASK_S = 0.25
# Timeout in seconds of one question.
CALL_S = 5.0


async def wait_until_registered(store: adapters_pb2_grpc.AdapterServiceAsyncStub, base: BaseModel) -> None:
    """Return once the store has the model. Raises MismatchError where it has another one under the name."""
    last_logged = ""
    while True:
        waits_for = ""
        try:
            answer = await store.GetBaseModel(pb.GetBaseModelRequest(name=base.name), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                waits_for = f"base model {base.name} to be registered (loraplex models push)"
            else:
                waits_for = f"the adapter store ({error.code().name})"
        else:
            if answer.model.digest == base.digest:
                return
            raise MismatchError(f"base model {base.name}", _what_differs(answer.model, base))
        if waits_for != last_logged:
            log.info("waits for %s", waits_for)
            last_logged = waits_for
        await asyncio.sleep(ASK_S)


def _what_differs(registered: pb.BaseModel, base: BaseModel) -> str:
    pairs = (
        ("--quantize", registered.quantization, base.quantization),
        ("--kv-cache-dtype", registered.kv_cache_dtype, base.kv_cache_dtype),
    )
    different = [pair for pair in pairs if pair[1] != pair[2]]
    if different and (registered.original_digest or registered.digest) == base.adapted_digest:
        theirs, ours = (" and ".join(_flag(pair[0], pair[side]) for pair in different) for side in (1, 2))
        return f"it is registered {theirs}, this worker runs {ours}; give both the same"
    return (
        f"the store has {registered.digest} under this name, this worker's files are {base.digest}; "
        "serve the registered files, or register these under another name"
    )


def _flag(flag: str, value: str) -> str:
    return f"with {flag} {value}" if value else f"without {flag}"
