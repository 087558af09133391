"""A request's adapters: their names become revisions, which the model can run and whose settings are read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.activation import parse_invocation
from loraplex.contracts.artifacts.added_tokens import (
    ADDED_FIELD,
    ENDS_FIELD,
    AddedToken,
    parse_added_tokens,
    parse_end_tokens,
)
from loraplex.contracts.artifacts.encoders import label_names
from loraplex.contracts.artifacts.names import weighted_digest
from loraplex.contracts.artifacts.peft_config import (
    CHAT_FIELD,
    CONFIG_FILE,
    HEADS,
    LABELS_FIELD,
    MAX_TOKENS_FIELD,
    SAVED_FIELD,
    ChatSettings,
    parse_chat_settings,
    parse_max_tokens,
)
from loraplex.contracts.broker.commands import is_of_tenant
from loraplex.contracts.broker.messages import AdapterRef, WeightedRef
from loraplex.router.catalog.store_client import Manifest, ResolvedAdapter, StoreClient
from loraplex.router.request import EncodeRequest, Request, WeightedAdapter
from loraplex.runtime.rpc.errors import InvalidField, Mismatch
from loraplex.runtime.rpc.tasks import SharedCalls

log = logging.getLogger(__name__)

# Maximum characters of the cached settings, and maximum number of adapters; beyond them the longest unused is dropped.
_KEPT_CHARACTERS = 32 * 1024 * 1024
_CACHED_REVISIONS = 10_000


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """An adapter's chat settings, whether it brings a classification head, its labels' names, and its tokens.

    `ends` are its end tokens beside the model's, by text or id; from the ids `invocation` on an activated one counts.
    `max_tokens` is the maximum of an answer whose request sets none; 0: the adapter has no such maximum.
    """

    chat: ChatSettings = field(default_factory=ChatSettings)
    has_head: bool = False
    labels: tuple[str, ...] = ()
    tokens: tuple[AddedToken, ...] = ()
    max_tokens: int = 0
    ends: tuple[str | int, ...] = ()
    invocation: tuple[int, ...] = ()

    @property
    def characters(self) -> int:
        """Return the length of its texts."""
        chat = self.chat
        texts = (chat.template, chat.tool_template, chat.system_prompt, *self.labels)
        return sum(map(len, texts)) + sum(len(token.content) for token in self.tokens)


class AdapterConfigs:
    """Reads adapters' settings from the store."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        # By digest, with the name of the revision that they were read of.
        self._cached: dict[str, tuple[str, AdapterSettings]] = {}
        self._characters = 0
        # By tenant and digest: a configuration has up to a megabyte.
        self._reading = SharedCalls[AdapterSettings]()

    async def of(self, tenant: str, adapter: AdapterRef | None) -> AdapterSettings:
        """Return an adapter's settings; a weighted set has none. Raises NotFound, Unavailable or InvalidField."""
        for part in adapter.parts if adapter is not None else ():
            if (await self.of(tenant, part.adapter)).invocation:
                message = (
                    f"{part.adapter.revision} is an activated adapter, which no weighted set can have; name it alone"
                )
                raise InvalidField("adapters", message)
        if adapter is None or adapter.parts:
            return AdapterSettings()
        if adapter.digest not in self._cached:
            return await self._reading.run((tenant, adapter.digest), lambda: self._ask(tenant, adapter))
        kept = self._cached[adapter.digest] = self._cached.pop(adapter.digest)  # to the end, as the last one used
        return kept[1]

    async def _ask(self, tenant: str, adapter: AdapterRef) -> AdapterSettings:
        config = await self._store.config_of(tenant, adapter.revision)
        settings = await asyncio.to_thread(_read, config)
        if adapter.digest not in self._cached:
            self._cached[adapter.digest] = adapter.revision, settings
            self._characters += settings.characters
            while len(self._cached) > _CACHED_REVISIONS or self._characters > _KEPT_CHARACTERS:
                self._characters -= self._cached.pop(next(iter(self._cached)))[1].characters
        return settings

    def forget_tenant(self, tenant: str) -> int:
        """Forget the settings of a tenant's adapters; returns how many there were."""
        gone = [digest for digest, (revision, _) in self._cached.items() if is_of_tenant(revision, tenant)]
        for digest in gone:
            self._characters -= self._cached.pop(digest)[1].characters
        return len(gone)


def _read(config: bytes) -> AdapterSettings:
    try:
        parsed = parse_object(config, CONFIG_FILE)
        chat = parse_chat_settings(parsed.get(CHAT_FIELD))
        tokens = parse_added_tokens(parsed.get(ADDED_FIELD))
        max_tokens = parse_max_tokens(parsed.get(MAX_TOKENS_FIELD))
        ends = parse_end_tokens(parsed.get(ENDS_FIELD))
        invocation = parse_invocation(parsed)
    except ArtifactError:  # of a hash model's adapter, which may be any bytes: the store has checked the others
        return AdapterSettings()
    has_head = not set(parsed.get(SAVED_FIELD) or ()).isdisjoint(HEADS)
    return AdapterSettings(chat, has_head, _labels(parsed), tokens, max_tokens, ends, invocation)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get(LABELS_FIELD)
    return label_names(config, len(names)) if isinstance(names, dict) and names else ()


# Reason of the error of a request whose task its base model and adapter do not serve.
WRONG_TASK = "WRONG_TASK"


@dataclass(frozen=True, slots=True)
class Classifier:
    """A classifier's labels in the order of its logits, and transformers' name of what it solves; empty: not known."""

    labels: tuple[str, ...] = ()
    problem_type: str = ""

    def labels_of(self, count: int) -> tuple[str, ...]:
        """Return the names of `count` logits; LABEL_0 and so on where neither adapter nor base names them."""
        return self.labels or tuple(f"LABEL_{index}" for index in range(count))


async def find_classifier(
    request: EncodeRequest, manifest: Manifest, adapter: AdapterRef | None, configs: AdapterConfigs
) -> Classifier:
    """Return the classifier that a request asks for, one without labels for an embedding.

    Raises Mismatch where base model and adapter do not serve the task, NotFound or Unavailable.
    """
    if request.task == "embed":
        if "embed" not in manifest.tasks:
            message = "makes no vectors; if it was registered without its tasks: loraplex models push --replace"
            raise Mismatch(manifest.name, message, reason=WRONG_TASK)
        return Classifier()
    settings = await configs.of(request.tenant, adapter)
    if settings.has_head:
        return Classifier(settings.labels)
    if "classify" not in manifest.tasks:
        message = f"{manifest.name} has no classification head; name an adapter that brings one (peft's SEQ_CLS)"
        raise Mismatch(adapter.revision if adapter else manifest.name, message, reason=WRONG_TASK)
    return Classifier(manifest.labels, manifest.problem_type)


def check_generates(manifest: Manifest) -> None:
    """Raise Mismatch where a base model generates nothing."""
    if "generate" not in manifest.tasks:
        raise Mismatch(manifest.name, "is an encoder and generates nothing; call Embed or Classify", reason=WRONG_TASK)


# Maximum number of adapters whose warning is remembered, so that their next request does not log it again.
_WARNINGS_KEPT = 4096


def check_fitness(resolved: ResolvedAdapter, model: Manifest) -> None:
    """Raise Mismatch, or log a warning once, where a certificate for the model's quantization breaks a limit."""
    breach = resolved.breaches.get(model.quantization)
    if breach is None:
        return
    breach_text = f"unfit for {model.name}, whose weights are {model.quantization}: {breach.text}"
    if not breach.refused:
        _warn_once(resolved.ref.revision, breach_text)
        return
    raise Mismatch(
        resolved.ref.revision,
        f"{breach_text}; use a base of more bits, or train the adapter on this base and certify it again",
        reason="ADAPTER_UNFIT",
    )


def forget_warnings() -> None:
    """Forget which adapters were warned of."""
    _warn_once.cache_clear()


@lru_cache(maxsize=_WARNINGS_KEPT)
def _warn_once(revision: str, message: str) -> None:
    log.warning("%s is %s", revision, message)


async def resolve_adapters(
    request: Request | EncodeRequest,
    revisions: Sequence[Manifest],
    store: StoreClient,
    chosen: ResolvedAdapter | None = None,
) -> tuple[Manifest, AdapterRef | None]:
    """Return the job's adapter, None for the base model alone, and the revision of the base model that it is for.

    `revisions`: the live one, which jobs without an adapter are for, then the others that workers serve; a job with
    adapters is for that which these were made for. `chosen` is the revision of a request under a rollout. Raises
    NotFound, InvalidField, Mismatch or Unavailable.
    """
    if request.adapters:
        resolved = await _resolve_all(request.tenant, request.adapters, store)
        model = _made_for(resolved[0], revisions)
        return model, _weighted_set(request.adapters, resolved, model)
    if request.adapter:
        one = chosen or await store.resolve(request.tenant, request.adapter)
        model = _made_for(one, revisions)
        return model, _checked(one, model)
    return revisions[0], None


def _made_for(resolved: ResolvedAdapter, revisions: Sequence[Manifest]) -> Manifest:
    return next((one for one in revisions if one.adapted_digest == resolved.base_digest), revisions[0])


def check_rank(ref: AdapterRef | None, max_rank: int | None) -> None:
    """Raise Mismatch where no worker takes the adapter. `max_rank` is the largest rank of any worker; None: unknown."""
    if ref is not None and max_rank is not None and ref.rank > max_rank:
        rank = f"rank {ref.rank}"
        if ref.parts:
            rank = f"ranks {' + '.join(str(part.adapter.rank) for part in ref.parts)} = {ref.rank}"
        raise Mismatch(
            "adapters" if ref.parts else ref.revision,
            f"{rank}; the workers take at most {max_rank}",
            reason="RANK_TOO_BIG",
        )


async def _resolve_all(tenant: str, weighted: Sequence[WeightedAdapter], store: StoreClient) -> list[ResolvedAdapter]:
    # Wait for all answers, so that the error names the first adapter of the request that has one.
    resolutions = await asyncio.gather(
        *(store.resolve(tenant, part.adapter) for part in weighted), return_exceptions=True
    )
    found = list[ResolvedAdapter]()
    for index, resolved in enumerate(resolutions):
        if isinstance(resolved, InvalidField):
            raise InvalidField(f"adapters[{index}]", resolved.message) from resolved
        if isinstance(resolved, BaseException):
            raise resolved
        found.append(resolved)
    return found


def _weighted_set(
    weighted: Sequence[WeightedAdapter], resolutions: Sequence[ResolvedAdapter], model: Manifest
) -> AdapterRef:
    parts: dict[str, WeightedRef] = {}
    for index, (part, resolved) in enumerate(zip(weighted, resolutions, strict=True)):
        ref = _checked(resolved, model)
        if ref.digest in parts:
            raise InvalidField(
                f"adapters[{index}]", f"{part.adapter} is the same as one before it; give it once, with both weights"
            )
        parts[ref.digest] = WeightedRef(ref, part.weight)
    refs = tuple(parts.values())
    if len(refs) == 1 and refs[0].weight == 1:
        return refs[0].adapter
    digest = weighted_digest((part.adapter.digest, part.weight) for part in refs)
    rank = sum(part.adapter.rank for part in refs)
    return AdapterRef(digest, digest, rank, sum(part.adapter.weight_bytes for part in refs), refs)


def _checked(resolved: ResolvedAdapter, model: Manifest) -> AdapterRef:
    if resolved.base_digest != model.adapted_digest:
        message = f"made for another base model than {model.name}, or a revision of it that no worker serves"
        raise Mismatch(resolved.ref.revision, message, reason="WRONG_BASE")
    check_fitness(resolved, model)
    return resolved.ref
