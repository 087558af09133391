"""Seals of what routers write into Redis for workers: encrypted with the job key, signed with the router's certificate.

    router   Seals.seal ──▶ Redis ──▶ Seals.open   worker

Who can read Redis learns nothing of the content, and who can write there, even with the job key, makes nothing that a
worker takes. A seal is for one kind and one place (the queue, or the list of one worker's commands), for a limited
time, and is opened once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from cryptography.exceptions import InvalidTag
from loraplex.queue.v1 import queue_pb2

from broker.job_keys import JobKeys
from broker.messages import AdapterRef, AdapterRequest, Job
from broker.seal_kinds import JOB_S, SealError, SealKind
from tenancy.signatures import RevisionGrantIssuer, Signature, SignatureError, Signer, Verifier

# Time in seconds that a sealed command is valid: longer than it waits, for clocks that differ.
COMMAND_S = 120.0
# Maximum number of seals that a worker remembers to have opened.
OPENED_LIMIT = 1 << 17
_NONCE_BYTES = 12
_LABEL = b"loraplex seal 1"


class Seals:
    """Seals of one process: a router seals and opens, a worker, without a signer, opens.

    `on_refused` is called with all that was not opened.
    """

    def __init__(
        self,
        keys: JobKeys,
        routers: Verifier,
        signer: Signer | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.keys, self._routers, self._signer, self._now = keys, routers, signer, now
        self._grants = None if signer is None else RevisionGrantIssuer(signer, now)
        self.on_refused: Callable[[SealKind, SealError], None] = lambda kind, error: None
        # Expiry of the seals that were opened here, by their nonces, the oldest first.
        self._opened: dict[bytes, float] = {}

    def made_with(self) -> tuple[int, str]:
        """Return what is sealed and granted with now: numbers of the certificate, and the id of the job key."""
        assert self._signer is not None, "routers seal"
        self.keys.look()
        return self._signer.look(), self.keys.newest[0]

    def granted(self, ref: AdapterRef, tenant: str) -> AdapterRef:
        """Return an adapter with a grant to download it."""
        assert self._grants is not None, "routers grant"
        revisions = tuple(summand.revision for summand in ref.summands)
        return replace(ref, grant=self._grants.issue(tenant, revisions))

    def granted_job(self, job: Job) -> Job:
        """Return a job with a grant for its adapter."""
        return job if job.adapter is None else replace(job, adapter=self.granted(job.adapter, job.tenant))

    def granted_request(self, request: AdapterRequest) -> AdapterRequest:
        """Return a request with a grant for its adapter."""
        return replace(request, adapter=self.granted(request.adapter, request.tenant))

    def seal(self, kind: SealKind, place: str, content: bytes) -> queue_pb2.Sealed:
        """Encrypt and sign a content for one place."""
        assert self._signer is not None, "routers seal"
        self.keys.look(recent=True)
        life_s = {SealKind.JOB: JOB_S, SealKind.COMMAND: COMMAND_S, SealKind.PIN: 0.0}[kind]
        key_id, key = self.keys.newest
        sealed = queue_pb2.Sealed(
            key_id=key_id,
            nonce=secrets.token_bytes(_NONCE_BYTES),
            expires_at_ms=int((self._now() + life_s) * 1e3) if life_s else 0,
        )
        bound = _bound(kind, place, sealed)
        sealed.ciphertext = key.encrypt(sealed.nonce, content, b"\0".join(bound))
        signature = self._signer.sign(*bound, sealed.ciphertext)
        sealed.certificates.extend(signature.certificates)
        sealed.signature = signature.value
        return sealed

    def look(self, *, recent: bool = True) -> bool:
        """Read the files of keys and authorities again that have changed; return whether any has.

        Call it before a wait for sealed contents. With `recent` a look of a moment ago is enough.
        """
        changed = self.keys.look(recent=recent)
        return self._routers.look(recent=recent) or changed

    def open(self, kind: SealKind, place: str, sealed: queue_pb2.Sealed) -> bytes:
        """Return the content; look again before it is refused, for files that have changed since. Raises SealError."""
        now = self._now()
        if kind is not SealKind.PIN and now * 1e3 >= sealed.expires_at_ms:
            raise SealError("SEAL_EXPIRED", f"a {kind} whose time is over")
        try:
            content = self._content(kind, place, sealed)
        except SealError:
            if not self.look(recent=False):
                raise
            content = self._content(kind, place, sealed)
        if kind is not SealKind.PIN:
            self._open_once(kind, sealed, now)
        return content

    def _content(self, kind: SealKind, place: str, sealed: queue_pb2.Sealed) -> bytes:
        bound = _bound(kind, place, sealed)
        signature = Signature(tuple(sealed.certificates), sealed.signature)
        try:
            signer = self._routers.verify(signature, *bound, sealed.ciphertext)
        except SignatureError as error:
            message = f"a {kind} that no router has sealed for this place: {error}"
            raise SealError("SIGNATURE_INVALID", message) from error
        key = self.keys.find(sealed.key_id)
        if key is None:
            raise SealError("KEY_UNKNOWN", f"a {kind} of {signer.name} with a job key that is not in --job-key")
        try:
            return key.decrypt(sealed.nonce, sealed.ciphertext, b"\0".join(bound))
        except InvalidTag as error:
            raise SealError("KEY_UNKNOWN", f"a {kind} of {signer.name} with another job key of this id") from error

    def _open_once(self, kind: SealKind, sealed: queue_pb2.Sealed, now: float) -> None:
        while self._opened and (len(self._opened) >= OPENED_LIMIT or next(iter(self._opened.values())) <= now):
            del self._opened[next(iter(self._opened))]
        if sealed.nonce in self._opened:
            raise SealError("REPLAYED", f"a {kind} that has been here before")
        self._opened[sealed.nonce] = sealed.expires_at_ms / 1e3


def _bound(kind: SealKind, place: str, sealed: queue_pb2.Sealed) -> tuple[bytes, ...]:
    """Return the parts that a seal binds its content to."""
    until = sealed.expires_at_ms.to_bytes(8, "big")
    return _LABEL, kind.encode(), place.encode(), sealed.key_id.encode(), sealed.nonce, until
