"""Loading, unloading and listing of adapters by a gateway: the operators' commands under the engine protocol's names.

An adapter is known by its name in the store, such as support, support@canary or tenants/acme/adapters/support: that is
its lora_name, its lora_id and its lora_path. So every router knows it, and no file of this machine is read.
"""

from __future__ import annotations

from typing import Any

from smg_grpc_proto import sglang_scheduler_pb2 as engine

from artifacts.names import SHARED
from broker.commands import Verb
from broker.connection import REDIS_DOWN
from router.api.operator_commands import AdapterCommands
from router.catalog.models import Models
from rpc.errors import InvalidField, Unavailable
from rpc.identity.principal import caller, calling_tenant


class Loras:
    """Sends the commands about adapters, and lists those that are kept on all workers."""

    def __init__(self, models: Models, commands: AdapterCommands) -> None:
        self._models = models
        self._commands = commands

    async def load(self, request: Any) -> Any:
        """Load an adapter on all workers; one that is pinned is kept there. Raises a CallError."""
        name = _name(request, ("lora_id", "lora_path"))
        await self._commands.send(Verb.PIN if request.pinned else Verb.WARM, calling_tenant(), name, "")
        return engine.LoadLoRAAdapterResponse(success=True, loaded_lora_ids=await self._ids())

    async def unload(self, request: Any) -> Any:
        """Allow an adapter to be evicted again, which happens when its place is needed. Raises a CallError."""
        await self._commands.send(Verb.UNPIN, calling_tenant(), _name(request, ("lora_id",)), "")
        return engine.UnloadLoRAAdapterResponse(success=True, loaded_lora_ids=await self._ids())

    async def pinned(self) -> Any:
        """List the pinned adapters that the caller may see. Raises Unavailable."""
        return engine.ListLoadedLoRAAdaptersResponse(loaded_adapters=await self._visible())

    async def _ids(self) -> list[str]:
        return [adapter.lora_id for adapter in await self._visible()]

    async def _visible(self) -> list[Any]:
        who, found = caller(), {}
        for model in self._models.served:
            try:
                pins = await model.queue.pins.list()
            except REDIS_DOWN as error:
                raise Unavailable("Redis does not answer", reason="QUEUE_DOWN") from error
            for pin in pins:
                # tenants/{tenant}/adapters/{adapter}/revisions/{digest}
                adapter, _, digest = pin.adapter.revision.partition("/revisions/")
                if who.sees_tenant(owner := adapter.split("/")[1]) or owner == SHARED:
                    found[pin.adapter.revision] = engine.LoadedLoRAAdapter(
                        lora_id=f"{adapter}@{digest}", lora_name=adapter, lora_path=pin.adapter.revision, pinned=True
                    )
        return [found[revision] for revision in sorted(found)]


def _name(request: Any, others: tuple[str, ...]) -> str:
    """Return the adapter's name, which the `others` repeat where they are set. Raises InvalidField."""
    name: str = request.lora_name
    if not name:
        raise InvalidField("lora_name", "name an adapter of the store")
    for field in others:
        if (given := getattr(request, field)) and given != name:
            message = f"{given!r} is not lora_name ({name!r}): adapters are known by their names in the store"
            raise InvalidField(field, message)
    return name
