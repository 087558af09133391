"""Resume tokens: all that another router needs to go on with a request, signed, in the hands of its client.

    base64url( HMAC-SHA256(key, tenant, payload) · payload )        payload: version byte · msgpack of ResumeClaims

The tenant is part of what is signed and not of what is sent, so that another tenant's token does not verify. Only what
is signed may name a revision's digest: a forged token would reach other tenants' adapters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from broker.messages import AdapterRef
from router.request import Received, Request
from rpc.errors import InvalidField

# Version of the payload's layout, the first byte of a payload; tokens of other versions are refused by that name.
VERSION = 2
# Minimum length of a key in characters.
KEY_CHARACTERS = 16
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


@dataclass(frozen=True, slots=True)
class Resumption:
    """A request that goes on. `received` by choice; the client has nothing of a choice that is missing there."""

    claims: ResumeClaims
    received: Mapping[int, Received] = field(default_factory=dict)

    def of_choice(self, choice: int) -> Received:
        """Return what the client has of a choice."""
        return self.received.get(choice, Received())

    def is_complete(self, request: Request) -> bool:
        """Return whether the client has every token already, and lacks the Summary alone."""
        return request.best_of == request.n and all(self.of_choice(choice).finished for choice in range(request.n))


class ResumeTokens:
    """Signs claims into tokens and verifies them."""

    def __init__(self, key: str = "") -> None:
        self._key = key.encode() if key else secrets.token_bytes(_MAC_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ResumeClaims)

    def sign(self, claims: ResumeClaims, tenant: str) -> str:
        """Return the token of the claims, good for this tenant alone."""
        payload = bytes([VERSION]) + self._encoder.encode(claims)
        return base64.urlsafe_b64encode(self._mac(tenant, payload) + payload).decode()

    def verify(self, token: str, tenant: str) -> ResumeClaims:
        """Return the claims in a token. Raises InvalidField."""
        if not token:
            raise InvalidField("resume_token", "is empty")
        if len(token) > _TOKEN_CHARACTERS:
            raise _forged()
        try:
            signed = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError, ValueError):
            raise _forged() from None
        mac, payload = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(tenant, payload)):
            raise _forged()
        if payload[:1] != bytes([VERSION]):  # signed by a router of another version: nobody forged it
            raise InvalidField(
                "resume_token",
                f"has another version than {VERSION}, which this router reads",
                reason="RESUME_TOKEN_VERSION",
            )
        return self._decoder.decode(payload[1:])

    def _mac(self, tenant: str, payload: bytes) -> bytes:
        # No tenant has a zero byte in its name.
        return hmac.digest(self._key, tenant.encode() + b"\0" + payload, "sha256")


def _forged() -> InvalidField:
    return InvalidField(
        "resume_token", "is not a token that these routers gave to this tenant", reason="RESUME_TOKEN_INVALID"
    )
