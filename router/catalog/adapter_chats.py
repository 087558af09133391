"""The chat settings that adapters carry in their configuration, by digest; kept for the next request."""

from __future__ import annotations

from collections import OrderedDict

from artifacts.chat_settings import CHAT_FIELD, ChatSettings, parse_chat_settings
from artifacts.errors import ArtifactError
from artifacts.json_object import parse_object
from artifacts.revision import CONFIG_FILE
from broker.messages import AdapterRef
from router.catalog.store_client import StoreClient

# Maximum characters of the settings that are kept, and maximum number of adapters; those used last stay.
_KEPT_CHARACTERS = 32 * 1024 * 1024
_KEPT = 10_000


class AdapterChats:
    """Reads adapters' chat settings from the store."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._kept: OrderedDict[str, ChatSettings] = OrderedDict()
        self._characters = 0

    async def of(self, tenant: str, adapter: AdapterRef | None) -> ChatSettings:
        """Return an adapter's settings; a weighted set has none. Raises NotFound or Unavailable."""
        if adapter is None or adapter.parts:
            return ChatSettings()
        if adapter.digest not in self._kept:
            settings = _read(await self._store.config_of(tenant, adapter.revision))
            if adapter.digest not in self._kept:
                self._kept[adapter.digest] = settings
                self._characters += _size(settings)
                self._drop_oldest()
            return settings
        self._kept.move_to_end(adapter.digest)
        return self._kept[adapter.digest]

    def _drop_oldest(self) -> None:
        while len(self._kept) > _KEPT or self._characters > _KEPT_CHARACTERS:
            _, dropped = self._kept.popitem(last=False)
            self._characters -= _size(dropped)


def _read(config: bytes) -> ChatSettings:
    try:
        return parse_chat_settings(parse_object(config, CONFIG_FILE).get(CHAT_FIELD))
    except ArtifactError:  # of a hash model's adapter, which may be any bytes: the store has checked the others
        return ChatSettings()


def _size(settings: ChatSettings) -> int:
    return len(settings.template) + len(settings.system_prompt)
