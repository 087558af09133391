"""/v1/models: the base models, and the adapters that the tenant may use."""

from __future__ import annotations

from typing import Any

from loraplex_client import Adapter, ServedModel

from clients.gateway.endpoint import HttpCall
from clients.gateway.errors import HttpError

_OWNER = "loraplex"


async def list_models(call: HttpCall) -> None:
    """Answer with all names that `model` may have. Raises LoraplexError."""
    await call.exchange.answer({"object": "list", "data": await _models(call)})


async def get_model(call: HttpCall) -> None:
    """Answer with one of them. Raises HttpError, LoraplexError."""
    name = call.parameters["model"]
    found = next((model for model in await _models(call) if model["id"] == name), None)
    if found is None:
        raise HttpError(404, "model_not_found", f"no model {name[:200]}", "model")
    await call.exchange.answer(found)


async def _models(call: HttpCall) -> list[dict[str, Any]]:
    bases = await call.cluster.models(call.caller)
    found = [_base(model) for model in bases]
    if call.cluster.has_store:
        served = {model.name for model in bases}
        adapters = [adapter for adapter in await call.caller.store.list() if adapter.base_model in served]
        # A tenant's own adapter hides a shared one of the same name.
        found += {model["id"]: model for model in map(_adapter, sorted(adapters, key=_is_own))}.values()
    return found


def _is_own(adapter: Adapter) -> bool:
    return not adapter.name.startswith("tenants/shared/")


def _base(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": _OWNER,
        "max_model_len": model.context_length,
        "parent": None,
    }


def _adapter(adapter: Adapter) -> dict[str, Any]:
    _, tenant, _, name = adapter.name.split("/")
    return {
        "id": name,
        "object": "model",
        "created": int(adapter.create_time.timestamp()),
        "owned_by": tenant,
        "root": adapter.name,
        "parent": adapter.base_model,
        "aliases": dict(adapter.aliases),
    }
