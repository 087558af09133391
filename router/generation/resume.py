"""Resume tokens: all that another router needs to go on with a request, signed, in the hands of its client.

    base64url( HMAC-SHA256(key, tenant, payload) · payload )        payload: version byte · msgpack of ResumeClaims

The tenant is part of what is signed and not of what is sent, so that another tenant's token does not verify. Only what
is signed may name a revision's digest: a forged token would reach other tenants' adapters. A token ends after TOKEN_S,
with the API key that its stream was called with, and with its adapter (resume_epochs.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from broker.messages import AdapterRef
from router.generation.resume_epochs import ResumeEpochs
from router.generation.resume_keys import GivenKeys, key_name
from router.quotas.usage import calling_key
from router.request import Received, Request
from rpc.errors import InvalidField, Unavailable

# Version of the payload's layout, the first byte of a payload; tokens of other versions are refused by that name.
VERSION = 2
# Time in seconds for which a token is good. Those of routers before tokens had an end count from their admission.
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


class ResumeClaims(msgspec.Struct, frozen=True, array_like=True):
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
    # Wall clock's time in seconds from which on the token is refused; 0 in those of routers before.
    expires_at_s: float = 0.0
    # Name of the resume key that has signed it; see resume_keys.key_name.
    signed_by: str = ""
    # Id of the API key that its stream was called with; empty: with another credential.
    api_key: str = ""
    # Epochs of the adapter, or of those of the set; none: they are not known.
    epochs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Resumption:
    """A request that goes on. `received` by choice; the client has nothing of a choice that is missing there."""

    claims: ResumeClaims
    received: Mapping[int, Received] = field(default_factory=dict)

    def of_choice(self, choice: int) -> Received:
        """Return what the client has of a choice."""
        return self.received.get(choice, Received())

    @property
    def received_tokens(self) -> int:
        """Return the number of tokens that the client has, of all choices."""
        return sum(len(had.token_ids) for had in self.received.values())

    def is_complete(self, request: Request) -> bool:
        """Return whether the client has every token already, and lacks the Summary alone."""
        return request.best_of == request.n and all(self.of_choice(choice).finished for choice in range(request.n))


class ResumeTokens:
    """Signs claims into tokens and verifies them."""

    def __init__(
        self, keys: GivenKeys, epochs: ResumeEpochs | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._keys = keys
        self._epochs = epochs
        self._now = now
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ResumeClaims)

    def sign(self, claims: ResumeClaims, tenant: str) -> str:
        """Return the token of the claims, good for this tenant alone, as the current call's."""
        key = self._keys.keys[0]
        claims = msgspec.structs.replace(
            claims,
            expires_at_s=self._now() + TOKEN_S,
            signed_by=key_name(key),
            api_key=calling_key(),
            epochs=claims.epochs or (self._epochs.of(claims.adapter) if self._epochs else ()),
        )
        payload = bytes([VERSION]) + self._encoder.encode(claims)
        return base64.urlsafe_b64encode(_mac(key, tenant, payload) + payload).decode()

    async def verify(self, token: str, tenant: str) -> ResumeClaims:
        """Return the claims in a token. Raises InvalidField, or Unavailable while keys may be missing."""
        mac, payload = _split(token)
        if not self._is_signed(mac, tenant, payload):
            if self._names_known_key(payload):
                raise _forged()
            await self._keys.look()
            if not self._is_signed(mac, tenant, payload):
                raise _forged() if self._keys.settled else _keys_missing()
        if payload[:1] != bytes([VERSION]):  # signed by a router of another version: nobody forged it
            raise InvalidField(
                "resume_token",
                f"has another version than {VERSION}, which this router reads",
                reason="RESUME_TOKEN_VERSION",
            )
        claims = self._decoder.decode(payload[1:])
        if self._now() >= (claims.expires_at_s or claims.rendered_at_s + TOKEN_S):
            raise InvalidField("resume_token", "has expired; call Generate again", reason="RESUME_TOKEN_EXPIRED")
        if self._epochs is not None:
            await self._epochs.check(claims.api_key, claims.adapter, claims.epochs, tenant)
        return claims

    def _is_signed(self, mac: bytes, tenant: str, payload: bytes) -> bool:
        return any(hmac.compare_digest(mac, _mac(key, tenant, payload)) for key in self._keys.keys)

    def _names_known_key(self, payload: bytes) -> bool:
        """Tell whether a token that no key has signed names one that is known: no other key can have signed it."""
        try:
            signed_by = self._decoder.decode(payload[1:]).signed_by
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


def _mac(key: str, tenant: str, payload: bytes) -> bytes:
    # No tenant has a zero byte in its name.
    return hmac.digest(key.encode(), tenant.encode() + b"\0" + payload, "sha256")


def _keys_missing() -> Unavailable:
    return Unavailable(
        "other routers have yet to store their resume keys again", retry_after_s=0.5, reason="RESUME_KEYS_MISSING"
    )


def _forged() -> InvalidField:
    return InvalidField(
        "resume_token", "is not a token that these routers gave to this tenant", reason="RESUME_TOKEN_INVALID"
    )
