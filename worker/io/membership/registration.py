"""Whether the base model that this worker loads is the one that the store has under its name."""

from __future__ import annotations

import asyncio
import logging

import grpc
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc

from artifacts.base_model import BaseModel
from artifacts.errors import MismatchError

log = logging.getLogger(__name__)

ASK_S = 0.25
CALL_S = 5.0


async def wait_until_registered(store: adapters_pb2_grpc.AdapterServiceAsyncStub, base: BaseModel) -> None:
    """Return once the store knows the model. Raises MismatchError where it knows another under the name."""
    told = ""
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
            raise MismatchError(
                f"base model {base.name}",
                f"the store has {answer.model.digest} under this name, this worker's files are {base.digest}; "
                "serve the registered files, or register these under another name",
            )
        if waits_for != told:
            log.info("waits for %s", waits_for)
            told = waits_for
        await asyncio.sleep(ASK_S)
