"""Serve the paths of vLLM's server that trainers call: load and unload adapters, pause, resume, server info.

A loaded adapter is a revision of the store like any other, with a time to live: it reaches every worker, calls that
began on an older one end on it, and no block of the prefix cache is shared with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Required

from typing_extensions import TypedDict

from loraplex.gateway.adapters_api import read_query, read_ttl
from loraplex.gateway.bodies import Body
from loraplex.gateway.endpoint import HttpCall, Protocol, always_served
from loraplex.gateway.errors import HttpError, no_store, not_served, renamed
from loraplex.gateway.openai_api import error_of as openai_error
from loraplex.gateway.openai_api import event
from loraplex.gateway.trainers import PAUSE_S
from loraplex_client import AlreadyExistsError, AsyncStoreClient, LoraplexError

# Names in these requests of the store's fields.
_NAMES = {
    r"(adapter|name|model)$": "lora_name",
    "source": "lora_path",
    "ttl$": "ttl_s",
    "base_model$": "base_model_name",
}
# Time in seconds that a revision lives, once no name means it.
_TTL_S = 86_400.0
# Number of adapters that are served at once, where vLLM has its slots: workers load what requests name.
_ADAPTERS = 1_000_000


class LoadAdapterRequest(TypedDict, total=False):
    """Body of a request to /v1/load_lora_adapter; `ttl_s` is not vLLM's."""

    lora_name: Required[str]
    lora_path: Required[str]
    load_inplace: bool | None
    base_model_name: str | None
    ttl_s: float | int | None


class UnloadAdapterRequest(TypedDict, total=False):
    """Body of a request to /v1/unload_lora_adapter."""

    lora_name: Required[str]
    lora_int_id: int | None


LOAD, UNLOAD = Body(LoadAdapterRequest), Body(UnloadAdapterRequest)


def error_of(error: HttpError) -> Mapping[str, Any]:
    """Return an error's answer in OpenAI's shape, with the names of these paths."""
    return openai_error(renamed(error, _NAMES))


PROTOCOL = Protocol(error_of, lambda error: event(error_of(error)))


async def load_adapter(call: HttpCall) -> None:
    """Load an adapter from a source that the store may read, under a name. Raises HttpError, LoraplexError."""
    request, store = await call.read(LOAD), _store(call)
    name, path = request["lora_name"], request["lora_path"]
    ttl_s = read_ttl(request.get("ttl_s")) or _TTL_S
    try:
        async with asyncio.timeout(call.timeout_s):
            loaded = await store.import_revision(
                f"file://{path}" if path.startswith("/") else path,
                name,
                base_model=request.get("base_model_name") or "",
                ttl_s=ttl_s,
                keep_alias=not request.get("load_inplace"),
            )
    except AlreadyExistsError as error:
        message = f"lora_name: {name[:200]} has other weights already; choose another name, or set load_inplace"
        raise HttpError(409, "name_taken", message, "lora_name") from error
    except LoraplexError:  # of which one is a TimeoutError too
        raise
    except TimeoutError:
        raise HttpError(504, "deadline_exceeded", "it was not loaded within the request's deadline") from None
    call.trainers.remember(call.counted_as, name, loaded.revision.digest)
    await call.exchange.answer(
        {
            "status": "ok",
            "name": name,
            "revision": loaded.revision.digest,
            "created": loaded.created,
            "warnings": loaded.warnings,
        }
    )


async def unload_adapter(call: HttpCall) -> None:
    """Remove an adapter with all its revisions; answers that run on them go on. Raises HttpError, LoraplexError."""
    name = (await call.read(UNLOAD))["lora_name"]
    await _store(call).delete(name)
    call.trainers.remember(call.counted_as, name, "")
    await call.exchange.answer({"status": "ok", "name": name})


async def pause(call: HttpCall) -> None:
    """Let the caller's new sampling calls wait until it resumes; those that run go on. Raises HttpError."""
    mode = read_query(call, ("mode", "clear_cache", "wait_for_inflight_requests")).get("mode", "keep")
    if mode not in {"keep", "wait"}:
        why = f"{mode[:80]!r} is not served: answers end on the revision that they began with; give keep or wait"
        raise not_served("mode", why)
    caller = await _holder(call)
    call.trainers.pause(caller, call.counted_as)
    if mode == "wait":
        try:
            async with asyncio.timeout(call.timeout_s or PAUSE_S):
                await call.trainers.wait_idle(caller)
        except TimeoutError:
            raise HttpError(504, "deadline_exceeded", "calls still run; new ones wait until /resume") from None
    await call.exchange.answer({"status": "paused"})


@always_served
async def resume(call: HttpCall) -> None:
    """Let the caller's sampling calls go on. Raises HttpError."""
    call.trainers.resume(await _holder(call))
    await call.exchange.answer({"status": "resumed"})


@always_served
async def is_paused(call: HttpCall) -> None:
    """Answer whether the caller's new sampling calls wait. Raises HttpError."""
    await call.exchange.answer({"is_paused": call.trainers.is_paused(await _holder(call))})


async def reset_prefix_cache(call: HttpCall) -> None:
    """Answer 200: a block belongs to one revision, so there is none of another's weights to forget."""
    await call.exchange.answer({"success": True})


async def server_info(call: HttpCall) -> None:
    """Answer what trainers look for in vLLM's configuration, of the first base model. Raises LoraplexError."""
    models = await call.cluster.models(call.caller)
    if not models:
        raise HttpError(503, "no_model", "no base model is served yet", retry_after_s=1.0)
    model = models[0]
    adapters = {"max_lora_rank": model.max_rank, "max_loras": _ADAPTERS, "max_cpu_loras": _ADAPTERS}
    config = {
        "model_config": {
            "model": model.name,
            "max_model_len": model.context_length,
            "logprobs_mode": call.logprobs_mode,
        },
        "lora_config": adapters if call.cluster.has_store else None,
        # However many workers there are: a loaded adapter reaches all of them.
        "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "weight_transfer_config": None,
    }
    await call.exchange.answer({"vllm_config": config})


async def _holder(call: HttpCall) -> bytes:
    """Return whose pause it is: of a credential that is valid now, since one that has ended was its holder's too."""
    return await call.cluster.identity(call.exchange.headers, fresh=True)


def _store(call: HttpCall) -> AsyncStoreClient:
    if not call.cluster.has_store:
        raise no_store()
    return call.caller.store
