"""Resume tokens: all that another router needs to go on with a request, signed, in the hands of its client.

    base64url( HMAC-SHA256(key, tenant, payload) · payload )        payload: JSON with short names

The tenant is part of what is signed and not of what is sent, so that another tenant's token is no token at all. Only
what is signed may name a revision's digest: a forged token would reach other tenants' adapters.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker.messages import AdapterRef, WeightedRef
from router.request import Received
from rpc.errors import InvalidField

VERSION = 1
KEY_CHARACTERS = 16
_MAC_BYTES = hashlib.sha256().digest_size
_TOKEN_CHARACTERS = 16_384


@dataclass(frozen=True, slots=True)
class Began:
    """How a request began, which only its first router saw. Times in seconds; `first_at_s` by the wall clock."""

    cached_tokens: int
    queue_s: float
    adapter_s: float
    ttft_s: float
    first_at_s: float


@dataclass(frozen=True, slots=True)
class ResumeClaims:
    """What a request was resolved to: with the request itself and the ids received, the same answer goes on."""

    request_id: str
    # Of the request that it was given for.
    fingerprint: str
    model: str
    base_digest: str
    adapter: AdapterRef | None
    seed: int
    max_tokens: int
    began: Began
    # How often the request has been resumed.
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class Resumption:
    """A request that goes on. `received` by choice; one that is not there has nothing yet."""

    claims: ResumeClaims
    received: Mapping[int, Received] = field(default_factory=dict)

    def has(self, choice: int) -> Received:
        """What the client has of a choice."""
        return self.received.get(choice, Received())


class ResumeTokens:
    """Signs claims into tokens and verifies them."""

    def __init__(self, key: str = "") -> None:
        self._key = key.encode() if key else secrets.token_bytes(_MAC_BYTES)

    def sign(self, claims: ResumeClaims, tenant: str) -> str:
        """The token of the claims, good for this tenant alone."""
        payload = json.dumps(_packed(claims), separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._mac(tenant, payload) + payload).decode()

    def verify(self, token: str, tenant: str) -> ResumeClaims:
        """The claims in a token. Raises InvalidField."""
        if not token:
            raise InvalidField("resume_token", "is empty")
        try:
            signed = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError, ValueError):
            raise _forged() from None
        mac, payload = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if len(token) > _TOKEN_CHARACTERS or not hmac.compare_digest(mac, self._mac(tenant, payload)):
            raise _forged()
        packed = json.loads(payload)
        if packed["v"] != VERSION:  # signed by a router of another version: nobody forged it
            raise InvalidField(
                "resume_token", f"has version {packed['v']}, this router reads {VERSION}", reason="RESUME_TOKEN_VERSION"
            )
        return _unpacked(packed)

    def _mac(self, tenant: str, payload: bytes) -> bytes:
        # No tenant has a zero byte in its name.
        return hmac.digest(self._key, tenant.encode() + b"\0" + payload, "sha256")


def _forged() -> InvalidField:
    return InvalidField(
        "resume_token",
        "is not a token that these routers gave to this tenant",
        reason="RESUME_TOKEN_INVALID",
    )


def _packed(claims: ResumeClaims) -> dict[str, Any]:
    began = claims.began
    return {
        "v": VERSION,
        "id": claims.request_id,
        "h": claims.fingerprint,
        "m": claims.model,
        "b": claims.base_digest,
        "a": _packed_adapter(claims.adapter),
        "s": claims.seed,
        "n": claims.max_tokens,
        "r": claims.resumes,
        "t": [began.cached_tokens, began.queue_s, began.adapter_s, began.ttft_s, began.first_at_s],
    }


def _unpacked(packed: Mapping[str, Any]) -> ResumeClaims:
    return ResumeClaims(
        request_id=packed["id"],
        fingerprint=packed["h"],
        model=packed["m"],
        base_digest=packed["b"],
        adapter=_unpacked_adapter(packed["a"]),
        seed=packed["s"],
        max_tokens=packed["n"],
        began=Began(*packed["t"]),
        resumes=packed["r"],
    )


def _packed_adapter(ref: AdapterRef | None) -> list[Any] | None:
    if ref is None:
        return None
    parts = [[_packed_adapter(part.adapter), part.weight] for part in ref.parts]
    return [ref.revision, ref.digest, ref.rank, ref.weight_bytes, parts]


def _unpacked_adapter(packed: list[Any] | None) -> AdapterRef | None:
    if packed is None:
        return None
    revision, digest, rank, weight_bytes, parts = packed
    refs = ((_unpacked_adapter(part), weight) for part, weight in parts)
    return AdapterRef(
        revision, digest, rank, weight_bytes, tuple(WeightedRef(ref, weight) for ref, weight in refs if ref is not None)
    )
