"""Resume tokens: all that another router needs to go on with a request, signed, in the hands of its client.

    base64url( HMAC-SHA256(key, tenant, packed) · packed )        packed: version byte · msgpack of ResumePayload

The tenant is part of what is signed and not of what is sent, so that another tenant's token does not verify. Only what
is signed may name a revision's digest: a forged token would reach other tenants' adapters. A token ends after TOKEN_S,
with the API key that its stream was called with, and with its adapter (ResumeEpochs).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import msgspec
from redis.asyncio import Redis

from loraplex.contracts.broker.connection import REDIS_DOWN
from loraplex.contracts.broker.keys import merge_resume_keys, rotate_resume_keys, withdraw_resume_keys
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.router.catalog.store_client import StoreClient
from loraplex.router.quotas.quotas import Facts
from loraplex.router.request import Received, Request
from loraplex.runtime.rpc.errors import CallError, InvalidField, Mismatch, NotFound, Unavailable
from loraplex.runtime.rpc.principal import calling_key
from loraplex.runtime.rpc.tasks import SharedCalls
from loraplex.runtime.tenancy.api_keys import KeyDirectory

log = logging.getLogger(__name__)

# Minimum length of a key in characters.
KEY_CHARACTERS = 16
# Interval in seconds between looks at the keys in Redis, and the shortest between looks for unknown tokens.
LOOK_S = 1.0
UNKNOWN_LOOK_S = 0.02
# Time in seconds for which other routers may still store their keys, after a new key was seen or Redis was away.
SETTLE_S = 3.0
# Maximum number of keys that a router accepts beside the given ones.
_KEYS_LIMIT = 16


@lru_cache(maxsize=64)
def key_name(key: str) -> str:
    """Return what tokens call the key that has signed them; it says nothing of the key."""
    return hmac.digest(key.encode(), b"name of a resume key", "sha256").hex()[:16]


class ResumeKeys:
    """The keys of resume tokens: the first signs, all are accepted, and the `accepted` ones beside them.

    given    --resume-key signs; it and --accepted-resume-keys are accepted, whatever Redis has; without any, a random
             one of this process's own
    derived  with credentials, and no key given: from the job keys, since who reads Redis must not forge tokens
    shared   kept in `redis`, made by the first router. Each router looks every LOOK_S, and puts its keys back where
             Redis has lost them. A key that an operator puts in front signs from the next look on; the older ones stay.
             Call `look` once before the first token is signed

    A token of an unknown key makes a router look at once, because another router may sign with a newer key already.
    """

    def __init__(
        self,
        key: str = "",
        accepted: Sequence[str] = (),
        *,
        derived: Callable[[], Sequence[str]] | None = None,
        redis: Redis | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._own = key or secrets.token_hex(32)
        self._accepted, self._derived, self._redis, self._settle_s = accepted, derived, redis, settle_s
        # All shared keys that tokens were accepted of, newest first.
        self._used: list[str] = []
        self._looked_at = self._settled_at = time.monotonic()
        self._looks = SharedCalls[None]()
        # True after a failed look.
        self._away = False

    @property
    def keys(self) -> Sequence[str]:
        """Return the keys whose tokens are accepted; the first one signs."""
        if self._derived is not None:
            return [*self._derived(), *self._accepted]
        return [*(self._used if self._redis is not None else [self._own]), *self._accepted]

    @property
    def settled(self) -> bool:
        """Return whether all routers have had the time to store their keys, and a token of another key is forged."""
        return time.monotonic() >= self._settled_at

    async def look(self) -> None:
        """Take over the keys in Redis, if they are shared; calls at the same time share a look."""
        if self._redis is not None:
            await self._looks.run(None, partial(self._look, self._redis))

    async def rotate(self) -> int:
        """Put a new key in front of the shared ones; return how many are valid. Raises Mismatch without shared ones."""
        return await rotate_resume_keys(self._shared(), secrets.token_hex(32))

    async def withdraw(self) -> int:
        """Remove the former shared keys; return how many. Raises Mismatch where routers do not share them.

        Routers that run accept them until they are started again.
        """
        return await withdraw_resume_keys(self._shared())

    def _shared(self) -> Redis:
        if self._redis is None:
            message = "the keys are not in Redis: they are derived from the job keys, or --resume-key gives one"
            raise Mismatch("resume keys", message, reason="RESUME_KEY_GIVEN")
        return self._redis

    async def _look(self, redis: Redis) -> None:
        await asyncio.sleep(self._looked_at + UNKNOWN_LOOK_S - time.monotonic() if self._used else 0.0)
        self._looked_at = time.monotonic()
        try:
            merged = await merge_resume_keys(redis, self._own, self._used)
            stored = [key for key in merged if len(key) >= KEY_CHARACTERS]
            self._away = False
        except REDIS_DOWN as error:
            if not self._away:
                log.warning("the resume keys cannot be read: %s", type(error).__name__)
            stored, self._away = [], True
        if not stored or stored[0] not in self._used:  # new, or new since Redis lost the others
            self._settled_at = time.monotonic() + self._settle_s
        # Without Redis the router's own key signs; it is stored behind the others later.
        keys = stored or self._used or [self._own]
        self._used = [*keys, *(key for key in self._used if key not in keys)][:_KEYS_LIMIT]


# Timeout in seconds for asking the store whether an adapter is still there. Without an answer the request goes on: the
# store's outage must not end answers that have begun.
CHECK_S = 0.5


class ResumeEpochs:
    """Ends resume tokens before their time: with the adapter's deletion, and with the end of the stream's API key.

    An adapter's epoch is the time of its making: one that is made again under the name has another. `keys` are those
    that the router admits callers with.
    """

    def __init__(self, store: StoreClient, keys: KeyDirectory, check_s: float = CHECK_S) -> None:
        self._store = store
        self._keys = keys
        self._check_s = check_s

    def of(self, adapter: AdapterRef | None) -> tuple[int, ...]:
        """Return the epochs of an adapter that this router has resolved, or of those of a set."""
        return () if adapter is None else tuple(self._store.epoch_of(part.revision) for part in adapter.summands)

    async def check(self, api_key: str, adapter: AdapterRef | None, epochs: tuple[int, ...], tenant: str) -> None:
        """Raise InvalidField where the API key or an adapter has ended, Unavailable where keys are not known."""
        if api_key and not self._keys.is_valid(api_key):
            raise _ended("the API key that it was given with")
        if adapter is None:
            return
        parts = adapter.summands
        try:
            async with asyncio.timeout(self._check_s):
                epochs_now = await asyncio.gather(*(self._epoch_now(part.revision, tenant) for part in parts))
        except NotFound:
            raise _ended("the adapter") from None
        except (TimeoutError, Unavailable):
            log.warning("a request is resumed unchecked: the adapter store does not answer")
            return
        if any(epoch not in {0, now} for epoch, now in zip(epochs, epochs_now, strict=False)):
            raise _ended("the adapter")

    async def _epoch_now(self, revision: str, tenant: str) -> int:
        """Return the epoch of a revision's adapter. Raises NotFound or Unavailable."""
        name, _, digest = revision.rpartition("/revisions/")
        try:
            return (await self._store.resolve(tenant, f"{name}@{digest}")).epoch
        except (NotFound, Unavailable):
            raise
        except CallError as error:
            raise Unavailable(error.message) from error


def _ended(what: str) -> InvalidField:
    return InvalidField("resume_token", f"has ended with {what}; call Generate again", reason="RESUME_TOKEN_ENDED")


# Version of the payload's layout, the first byte of a payload; tokens of other versions are refused by that name.
VERSION = 2
# Version of a payload with values of the model's: a router of an earlier version would leave them out, and refuses it.
FILLED_VERSION = 3
# Time in seconds for which a token is good.
TOKEN_S = 86_400.0
_MAC_BYTES = hashlib.sha256().digest_size
# Maximum length of a token in characters, so that nothing longer is hashed.
_TOKEN_CHARACTERS = 16_384


class Began(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a request, which only its first router saw. Times in seconds; `first_at_s` by the wall clock."""

    cached_tokens: int
    queue_s: float
    adapter_s: float
    ttft_s: float
    first_at_s: float


class ResumePayload(msgspec.Struct, frozen=True, array_like=True):
    """The resolution of a request: with the request itself and the ids received, the same answer goes on."""

    request_id: str
    # Fingerprint of the request that the token was given for.
    fingerprint: str
    model: str
    base_digest: str
    adapter: AdapterRef | None
    seed: int
    max_tokens: int
    began: Began
    # Number of times that the request has been resumed.
    resumes: int = 0
    # Wall clock's time in seconds at which the request was admitted, which its chat template may show.
    rendered_at_s: float = 0.0
    # Id of the request's reservation of tokens; empty: its tenant had no limits.
    reservation: str = ""
    # Wall clock's time in seconds from which on the token is refused.
    expires_at_s: float = 0.0
    # Name of the resume key that has signed it; see key_name.
    signed_by: str = ""
    # Id of the API key that its stream was called with; empty: with another credential.
    api_key: str = ""
    # Epochs of the adapter, or of those of the set; none: they are not known.
    epochs: tuple[int, ...] = ()
    # Fields of sampling that the request left unset, with the values that the model had for them at admission.
    filled: dict[str, Any] = {}
    # Paths of parts of tools' schemas that may be anything, since with them no grammar could be compiled.
    free_parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resumption:
    """A request that goes on. `received` by choice; the client has nothing of a choice that is missing there."""

    payload: ResumePayload
    received: Mapping[int, Received] = field(default_factory=dict)

    def of_choice(self, choice: int) -> Received:
        """Return what the client has of a choice."""
        return self.received.get(choice, Received())

    @property
    def received_tokens(self) -> int:
        """Return the number of tokens that the client has, of all choices."""
        return sum(len(received.token_ids) for received in self.received.values())

    @property
    def reserved(self) -> tuple[str, int]:
        """Return the request's reservation, and the tokens that its client has."""
        return self.payload.reservation, self.received_tokens

    @property
    def facts(self) -> Facts:
        """Return what is known for the usage event."""
        return Facts(cached_tokens=self.payload.began.cached_tokens)

    def is_complete(self, request: Request) -> bool:
        """Return whether the client has every token already, and lacks the Summary alone."""
        return request.best_of == request.n and all(self.of_choice(choice).finished for choice in range(request.n))


class ResumeTokens:
    """Signs payloads into tokens and verifies them."""

    def __init__(
        self, keys: ResumeKeys, epochs: ResumeEpochs | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._keys = keys
        self._epochs = epochs
        self._now = now
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ResumePayload)

    def sign(self, payload: ResumePayload, tenant: str) -> str:
        """Return the token of the payload, good for this tenant alone, as the current call's."""
        key = self._keys.keys[0]
        payload = msgspec.structs.replace(
            payload,
            expires_at_s=self._now() + TOKEN_S,
            signed_by=key_name(key),
            api_key=calling_key(),
            epochs=payload.epochs or (self._epochs.of(payload.adapter) if self._epochs else ()),
        )
        packed = bytes([FILLED_VERSION if payload.filled else VERSION]) + self._encoder.encode(payload)
        return base64.urlsafe_b64encode(_mac(key, tenant, packed) + packed).decode()

    async def verify(self, token: str, tenant: str) -> ResumePayload:
        """Return the payload in a token. Raises InvalidField, or Unavailable while keys may be missing."""
        mac, packed = _split(token)
        if not self._is_signed(mac, tenant, packed):
            if self._names_known_key(packed):
                raise _forged()
            await self._keys.look()
            if not self._is_signed(mac, tenant, packed):
                if self._keys.settled:
                    raise _forged()
                message = "other routers have yet to store their resume keys again"
                raise Unavailable(message, retry_after_s=0.5, reason="RESUME_KEYS_MISSING")
        if packed[:1] not in (bytes([VERSION]), bytes([FILLED_VERSION])):  # of another router's version, not forged
            raise InvalidField(
                "resume_token",
                f"has another version than {VERSION} and {FILLED_VERSION}, which this router reads",
                reason="RESUME_TOKEN_VERSION",
            )
        payload = self._decoder.decode(packed[1:])
        if self._now() >= payload.expires_at_s:
            raise InvalidField("resume_token", "has expired; call Generate again", reason="RESUME_TOKEN_EXPIRED")
        if self._epochs is not None:
            await self._epochs.check(payload.api_key, payload.adapter, payload.epochs, tenant)
        return payload

    def _is_signed(self, mac: bytes, tenant: str, packed: bytes) -> bool:
        return any(hmac.compare_digest(mac, _mac(key, tenant, packed)) for key in self._keys.keys)

    def _names_known_key(self, packed: bytes) -> bool:
        """Tell whether a token with an invalid signature claims a known key: no other key can have signed it."""
        try:
            signed_by = self._decoder.decode(packed[1:]).signed_by
        except (msgspec.MsgspecError, ValueError, RecursionError):  # anybody may have written it
            return False
        return any(signed_by == key_name(key) for key in self._keys.keys)


def _split(token: str) -> tuple[bytes, bytes]:
    """Return a token's signature and its payload. Raises InvalidField on what no router can have made."""
    if not token:
        raise InvalidField("resume_token", "is empty")
    if len(token) > _TOKEN_CHARACTERS:
        raise _forged()
    try:
        signed = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError):
        raise _forged() from None
    return signed[:_MAC_BYTES], signed[_MAC_BYTES:]


def _mac(key: str, tenant: str, packed: bytes) -> bytes:
    # No tenant has a zero byte in its name.
    return hmac.digest(key.encode(), tenant.encode() + b"\0" + packed, "sha256")


def _forged() -> InvalidField:
    return InvalidField(
        "resume_token", "is not a token that these routers gave to this tenant", reason="RESUME_TOKEN_INVALID"
    )
