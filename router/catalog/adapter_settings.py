"""The parts of adapters' configurations that routers read, by digest; kept for the next request."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from artifacts.chat_settings import CHAT_FIELD, ChatSettings, parse_chat_settings
from artifacts.encoders import label_names
from artifacts.errors import ArtifactError
from artifacts.json_object import parse_object
from artifacts.peft_config import LABELS_FIELD
from artifacts.revision import CONFIG_FILE
from broker.messages import AdapterRef
from broker.pins import is_of_tenant
from router.catalog.shared_calls import SharedCalls
from router.catalog.store_client import StoreClient

# Maximum characters of the settings that are kept, and maximum number of adapters; those used last stay.
_KEPT_CHARACTERS = 32 * 1024 * 1024
_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """An adapter's chat settings, whether it brings a classification head, and the names of its labels, if any."""

    chat: ChatSettings = field(default_factory=ChatSettings)
    has_head: bool = False
    labels: tuple[str, ...] = ()

    @property
    def characters(self) -> int:
        """Return the length of its texts."""
        return len(self.chat.template) + len(self.chat.system_prompt) + sum(map(len, self.labels))


class AdapterConfigs:
    """Reads adapters' settings from the store."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        # By digest, with the name of the revision that they were read of.
        self._kept: OrderedDict[str, tuple[str, AdapterSettings]] = OrderedDict()
        self._characters = 0
        # By tenant and digest: a configuration has up to a megabyte.
        self._reading = SharedCalls[AdapterSettings]()

    async def of(self, tenant: str, adapter: AdapterRef | None) -> AdapterSettings:
        """Return an adapter's settings; a weighted set has none. Raises NotFound or Unavailable."""
        if adapter is None or adapter.parts:
            return AdapterSettings()
        if adapter.digest not in self._kept:
            return await self._reading.run((tenant, adapter.digest), lambda: self._ask(tenant, adapter))
        self._kept.move_to_end(adapter.digest)
        return self._kept[adapter.digest][1]

    async def _ask(self, tenant: str, adapter: AdapterRef) -> AdapterSettings:
        config = await self._store.config_of(tenant, adapter.revision)
        settings = await asyncio.to_thread(_read, config)
        if adapter.digest not in self._kept:
            self._kept[adapter.digest] = adapter.revision, settings
            self._characters += settings.characters
            self._drop_oldest()
        return settings

    def forget_tenant(self, tenant: str) -> int:
        """Forget the settings of a tenant's adapters; returns how many there were."""
        gone = [digest for digest, (revision, _) in self._kept.items() if is_of_tenant(revision, tenant)]
        for digest in gone:
            self._characters -= self._kept.pop(digest)[1].characters
        return len(gone)

    def _drop_oldest(self) -> None:
        while len(self._kept) > _KEPT or self._characters > _KEPT_CHARACTERS:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._characters -= dropped.characters


def _read(config: bytes) -> AdapterSettings:
    try:
        parsed = parse_object(config, CONFIG_FILE)
        chat = parse_chat_settings(parsed.get(CHAT_FIELD))
    except ArtifactError:  # of a hash model's adapter, which may be any bytes: the store has checked the others
        return AdapterSettings()
    # The store accepts no other modules than those of heads.
    return AdapterSettings(chat, bool(parsed.get("modules_to_save")), _labels(parsed))


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get(LABELS_FIELD)
    return label_names(config, len(names)) if isinstance(names, dict) and names else ()
