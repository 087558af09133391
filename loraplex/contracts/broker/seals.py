"""Seals of what routers write into Redis for workers: encrypted with the job key, signed with the router's certificate.

    router   Seals.seal ──▶ Redis ──▶ Seals.open   worker

Who can read Redis learns nothing of the content, and who can write there, even with the job key, makes nothing that a
worker takes. A seal is for one kind and one place (the queue, or the list of one worker's commands), for a limited
time, and is opened once. The queue's functions decide by facts that stand beside a sealed job: a worker takes it only
if they are its own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

from cryptography.exceptions import InvalidTag
from msgspec import DecodeError

from loraplex.contracts.broker.job_keys import JobKeys
from loraplex.contracts.broker.messages import (
    SEALED,
    AdapterRef,
    AdapterRequest,
    Job,
    Sealed,
    SealError,
    SealKind,
    decode_job,
    decode_record,
    encode_record,
)
from loraplex.contracts.broker.terms import FACTS, PLACE_BYTES, SEALED_JOB_S, Entry, Placement, placed, read_facts
from loraplex.runtime.tenancy.signatures import (
    UNREADABLE,
    RevisionGrantIssuer,
    Signature,
    SignatureError,
    Signer,
    Verifier,
)

# Time in seconds that a sealed command is valid: longer than it waits, for clocks that differ.
COMMAND_S = 120.0
# Maximum number of seals that a worker remembers to have opened.
OPENED_LIMIT = 1 << 17
_NONCE_BYTES = 12
_LABEL = b"loraplex seal 1"
# Facts that the sealed job does not have.
_OF_PLACEMENT = {"prefer", "load", "key", "key_weight"}


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

    def entry(self, prefix: str, job: Job, placement: Placement) -> Entry:
        """Return a job's entry with a sealed body, in which the job has a grant for its adapter."""
        if job.adapter is not None:
            job = replace(job, adapter=self.granted(job.adapter, job.tenant))
        body = self.seal(SealKind.JOB, prefix, encode_record(placed(job, placement)))
        return Entry.from_job(job, placement, SEALED + encode_record(body))

    def granted_request(self, request: AdapterRequest) -> AdapterRequest:
        """Return a request with a grant for its adapter."""
        return replace(request, adapter=self.granted(request.adapter, request.tenant))

    def seal(self, kind: SealKind, place: str, content: bytes) -> Sealed:
        """Encrypt and sign a content for one place."""
        assert self._signer is not None, "routers seal"
        self.keys.look(recent=True)
        life_s = {SealKind.JOB: SEALED_JOB_S, SealKind.COMMAND: COMMAND_S, SealKind.PIN: 0.0}[kind]
        key_id, key = self.keys.newest
        sealed = Sealed(
            key_id=key_id,
            nonce=secrets.token_bytes(_NONCE_BYTES),
            expires_at_ms=int((self._now() + life_s) * 1e3) if life_s else 0,
        )
        bound = _bound(kind, place, sealed)
        sealed.ciphertext = key.encrypt(sealed.nonce, content, b"\0".join(bound))
        signature = self._signer.sign(*bound, sealed.ciphertext)
        sealed.certificates, sealed.signature = tuple(signature.certificates), signature.value
        return sealed

    def look(self, *, recent: bool = True) -> bool:
        """Read the files of keys and authorities again that have changed; return whether any has.

        Call it before a wait for sealed contents. With `recent` a look of a moment ago is enough.
        """
        changed = self.keys.look(recent=recent)
        return self._routers.look(recent=recent) or changed

    def open(self, kind: SealKind, place: str, sealed: Sealed) -> bytes:
        """Return the content; look again before it is refused, for files that have changed since. Raises SealError."""
        now = self._now()
        if kind is not SealKind.PIN and now * 1e3 >= sealed.expires_at_ms:
            raise SealError("SEAL_EXPIRED", f"a {kind} whose time is over", sealed.expires_at_ms)
        try:
            content = self._content(kind, place, sealed)
        except SealError:
            if not self.look(recent=False):
                raise
            content = self._content(kind, place, sealed)
        if kind is not SealKind.PIN:
            self._open_once(kind, sealed, now)
        return content

    def open_or_refuse(self, kind: SealKind, place: str, data: bytes | None) -> bytes | None:
        """Return the content of an encoded seal; None for what is not opened, and for None, which has no seal."""
        try:
            return self._opened_content(kind, place, data)
        except SealError as error:
            self.on_refused(kind, error)
            return None

    def open_job(self, prefix: str, body: bytes, facts: bytes) -> Job:
        """Return a claimed job. Raises SealError."""
        try:
            content = self._opened_content(
                SealKind.JOB, prefix, body.removeprefix(SEALED) if body.startswith(SEALED) else None
            )
            try:
                job = decode_job(content)
            except DecodeError as error:  # of a router of another version
                raise SealError("UNREADABLE", "a job that this version cannot read") from error
            _check_facts(job, facts)
        except SealError as error:
            self.on_refused(SealKind.JOB, error)
            raise
        return job

    def _opened_content(self, kind: SealKind, place: str, data: bytes | None) -> bytes:
        """Return the content of an encoded seal; None has no seal. Raises SealError."""
        if data is None:
            raise SealError("UNSEALED", f"a {kind} without a seal")
        try:
            sealed = decode_record(Sealed, data)
        except DecodeError as error:
            raise SealError("UNSEALED", f"a {kind} that is no message") from error
        return self.open(kind, place, sealed)

    def _content(self, kind: SealKind, place: str, sealed: Sealed) -> bytes:
        bound = _bound(kind, place, sealed)
        signature = Signature(sealed.certificates, sealed.signature)
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

    def _open_once(self, kind: SealKind, sealed: Sealed, now: float) -> None:
        while self._opened and (len(self._opened) >= OPENED_LIMIT or next(iter(self._opened.values())) <= now):
            del self._opened[next(iter(self._opened))]
        if sealed.nonce in self._opened:
            raise SealError("REPLAYED", f"a {kind} that has been here before")
        self._opened[sealed.nonce] = sealed.expires_at_ms / 1e3


def _bound(kind: SealKind, place: str, sealed: Sealed) -> tuple[bytes, ...]:
    """Return the parts that a seal binds its content to."""
    until = sealed.expires_at_ms.to_bytes(8, "big")
    return _LABEL, kind.encode(), place.encode(), sealed.key_id.encode(), sealed.nonce, until


def _check_facts(job: Job, packed: bytes) -> None:
    """Raise SealError where the queue has handled another job than the sealed one."""
    try:
        noted = read_facts(packed)
    except UNREADABLE as error:
        raise SealError("FACTS_DIFFER", "a job whose facts cannot be read") from error
    place = str(noted["place"])
    if job.job_id not in (place, place[PLACE_BYTES:]):
        raise SealError("FACTS_DIFFER", "a job whose id in the queue is not the sealed one")
    entry = Entry.from_job(job, Placement(weight=job.weight), b"")
    for name in FACTS:
        if name not in _OF_PLACEMENT and noted[name] != getattr(entry, name):
            raise SealError("FACTS_DIFFER", f"a job whose {name} in the queue is not the sealed one")
