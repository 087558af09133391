"""Grants of routers to workers: for a short time, to download these revisions for this tenant.

A worker has no rights of its own at the store: with a job it gets a grant for what the job needs, and shows it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from rpc.identity.signatures import Signature, SignatureError, Signer, Verifier

# Time in seconds that a grant is valid. Routers hand one out again while half of it is left, which is as long as a
# sealed job may wait.
GRANT_S = 1_800.0
_LABEL = b"loraplex revision grant 1"
# Errors of messages that cannot be read: a text that is no UTF-8 is a ValueError, a thousand nested arrays the last.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
# Maximum number of grants that a router keeps to hand them out again.
_KEPT = 4_096


class RevisionGrant(msgspec.Struct, array_like=True, frozen=True):
    """The tenant, the full names of the revisions, and the end in seconds since 1970."""

    tenant: str
    revisions: tuple[str, ...]
    expires_at: float


class _SignedGrant(msgspec.Struct, array_like=True, frozen=True):
    content: bytes
    certificates: tuple[bytes, ...]
    signature: bytes


class RevisionGrantIssuer:
    """Makes a router's grants; the same one again for the same revisions."""

    def __init__(self, signer: Signer, now: Callable[[], float] = time.time) -> None:
        self._signer, self._now = signer, now
        self._kept: dict[tuple[str, tuple[str, ...]], tuple[float, bytes]] = {}
        # Number of the signer's certificate that they were made with.
        self._version = signer.look()

    def issue(self, tenant: str, revisions: tuple[str, ...]) -> bytes:
        """Return a grant as it is sent."""
        now, key = self._now(), (tenant, revisions)
        if (version := self._signer.look(recent=True)) != self._version:  # the former one may end before they do
            self._kept, self._version = {}, version
        expires_at, packed = self._kept.get(key, (0.0, b""))
        if expires_at - now < GRANT_S / 2:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            packed = self._sign(RevisionGrant(tenant, revisions, now + GRANT_S))
            self._kept[key] = now + GRANT_S, packed
        return packed

    def _sign(self, grant: RevisionGrant) -> bytes:
        content = msgspec.msgpack.encode(grant)
        signature = self._signer.sign(_LABEL, content)
        return msgspec.msgpack.encode(_SignedGrant(content, signature.certificates, signature.value))


def left_s(packed: bytes, now: float) -> float:
    """Return how many seconds a grant is still valid, without checking who made it; 0 for what is none."""
    try:
        grant = msgspec.msgpack.decode(msgspec.msgpack.decode(packed, type=_SignedGrant).content, type=RevisionGrant)
    except UNREADABLE:
        return 0.0
    return max(0.0, grant.expires_at - now)


class RevisionGrantVerifier:
    """Checks grants at the store; `routers` verifies signatures of routers."""

    def __init__(self, routers: Verifier, now: Callable[[], float] = time.time) -> None:
        self._routers, self._now = routers, now

    def check(self, packed: bytes, tenant: str, revision: str) -> None:
        """Raise SignatureError unless a router permits the download of this revision for this tenant now."""
        try:
            signed = msgspec.msgpack.decode(packed, type=_SignedGrant)
            self._verify(signed)
            grant = msgspec.msgpack.decode(signed.content, type=RevisionGrant)
        except UNREADABLE as error:
            raise SignatureError("the grant cannot be read") from error
        if self._now() >= grant.expires_at:
            raise SignatureError("the grant has expired")
        if grant.tenant != tenant or revision not in grant.revisions:
            raise SignatureError("the grant is for another revision or tenant")

    def _verify(self, signed: _SignedGrant) -> None:
        """Raise SignatureError unless a router has signed a grant; look again for authorities before."""
        signature = Signature(signed.certificates, signed.signature)
        self._routers.look(recent=True)
        try:
            self._routers.verify(signature, _LABEL, signed.content)
        except SignatureError:
            if not self._routers.look():
                raise
            self._routers.verify(signature, _LABEL, signed.content)
