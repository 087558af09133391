"""Signatures by a process's certificate: of routers, over what workers and stores get by way of Redis.

A signature comes with the certificate that made it, and with those between it and the authority. So whoever knows the
authority can check it, and processes share no list of keys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store

from loraplex.runtime.rpc.principal import Principal, Role
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.certificates import own_name, principal_in

log = logging.getLogger(__name__)

# Maximum number of certificates whose chains are known to be right, and maximum length of a chain.
_KNOWN_CHAINS = 256
_CHAIN = 4


class SignatureError(Exception):
    """A signature that is not valid, or of somebody else."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature, and the signer's certificates in DER, its own first."""

    certificates: tuple[bytes, ...]
    value: bytes


class Signer:
    """Signs with the key of a process's certificate, which names `role`. Raises ValueError where it cannot."""

    def __init__(self, tls: TlsFiles, role: Role) -> None:
        self._tls, self._role = tls, role
        self._version = tls.version
        self._read()

    def look(self, *, recent: bool = False) -> int:
        """Read the certificate again if its file has changed; return a number that changes with it.

        With `recent` a look of a moment ago is enough.
        """
        self._tls.look(recent=recent)
        if self._tls.version != self._version:
            self._version = self._tls.version
            try:
                self._read()
            except ValueError as error:
                log.warning("signs with the former certificate: %s", error)
        return self._version

    def sign(self, *parts: bytes) -> Signature:
        """Sign the parts; the first is the purpose of the signature."""
        self.look(recent=True)
        return Signature(self._certificates, _sign(self._key, _joined(parts)))

    def _read(self) -> None:
        own_name(self._tls, self._role)
        pems = self._tls.content
        key = load_pem_private_key(pems.key, None)
        if not isinstance(key, (ec.EllipticCurvePrivateKey, ed25519.Ed25519PrivateKey, rsa.RSAPrivateKey)):
            raise ValueError("--tls-key: not an elliptic curve, Ed25519 or RSA key")
        self._key = key
        chain = x509.load_pem_x509_certificates(pems.cert)
        self._certificates = tuple(certificate.public_bytes(Encoding.DER) for certificate in chain)


class Verifier:
    """Checks signatures of holders of `role` whose certificates an authority of the process signed."""

    def __init__(self, tls: TlsFiles, role: Role, now: Callable[[], float] = time.time) -> None:
        self._tls, self._role, self._now = tls, role, now
        self._version = tls.version
        self._signer = lru_cache(_KNOWN_CHAINS)(self._check_chain)

    def look(self, *, recent: bool = False) -> bool:
        """Read the authorities again if their file has changed; return whether that or the certificate's has."""
        return self._tls.look(recent=recent)

    def verify(self, signature: Signature, *parts: bytes) -> Principal:
        """Return who has signed the parts, by the authorities of the last look. Raises SignatureError."""
        if self._tls.version != self._version:
            self._version = self._tls.version
            self._signer.cache_clear()
        certificate, principal = self._signer(signature.certificates)
        if principal.expires_at is not None and self._now() >= principal.expires_at:
            raise SignatureError(f"the certificate of {principal.name} has expired")
        try:
            _verify(certificate.public_key(), signature.value, _joined(parts))
        except InvalidSignature as error:
            raise SignatureError(f"not what {principal.name} has signed") from error
        return principal

    def _check_chain(self, certificates: tuple[bytes, ...]) -> tuple[x509.Certificate, Principal]:
        if not 0 < len(certificates) <= _CHAIN:
            raise SignatureError(f"{len(certificates)} certificates of the signer")
        try:
            certificate, *between = map(x509.load_der_x509_certificate, certificates)
            store = Store(x509.load_pem_x509_certificates(self._tls.content.ca))
            chain = PolicyBuilder().store(store).build_client_verifier().verify(certificate, between).chain
        except Exception as error:  # of a stranger's bytes: versions, extensions, algorithms have errors of their own
            raise SignatureError("no authority of --tls-ca has signed the signer's certificate") from error
        principal = principal_in(certificate)
        if principal is None or self._role not in principal.roles:
            who = "nobody" if principal is None else principal.name
            raise SignatureError(f"the signer's certificate names {who}, not a {self._role.value}")
        # The chain is not checked again while it is known: it ends with the first of its certificates.
        return certificate, replace(principal, expires_at=min(one.not_valid_after_utc for one in chain).timestamp())


_Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def _sign(key: _Key, content: bytes) -> bytes:
    match key:
        case ec.EllipticCurvePrivateKey():
            return key.sign(content, ec.ECDSA(hashes.SHA256()))
        case rsa.RSAPrivateKey():
            return key.sign(content, padding.PKCS1v15(), hashes.SHA256())
        case _:
            return key.sign(content)


def _verify(key: object, signature: bytes, content: bytes) -> None:
    """Raise InvalidSignature where the key's owner did not sign the content."""
    match key:
        case ec.EllipticCurvePublicKey():
            key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
        case ed25519.Ed25519PublicKey():
            key.verify(signature, content)
        case rsa.RSAPublicKey():
            key.verify(signature, content, padding.PKCS1v15(), hashes.SHA256())
        case _:
            raise InvalidSignature


def _joined(parts: Sequence[bytes]) -> bytes:
    """Join parts so that other parts give other bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def welcome_parts(nonce: bytes, worker: str) -> tuple[bytes, bytes, bytes]:
    """Return what a router signs for a worker that dials it; `worker` is the NAME in the worker's certificate.

    With the name in it, another worker that stands between the two cannot pass the signature on.
    """
    return b"loraplex relay welcome 1", nonce, worker.encode()


# Time in seconds that a grant is valid. Routers hand one out again while half of it is left, which is as long as a
# sealed job may wait.
GRANT_S = 1_800.0
_LABEL = b"loraplex revision grant 1"
# Errors of messages that cannot be read: a text that is not UTF-8 is a ValueError, a thousand nested arrays the last.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
# Maximum number of grants that a router keeps to hand them out again.
_CACHED_TICKETS = 4_096


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
        self._signed = lru_cache(_CACHED_TICKETS)(self._sign)

    def issue(self, tenant: str, revisions: tuple[str, ...]) -> bytes:
        """Return a serialized grant, valid for GRANT_S / 2 to GRANT_S seconds."""
        # With another certificate another one is made: the former one may end before they do.
        return self._signed(tenant, revisions, int(self._now() / (GRANT_S / 2)), self._signer.look(recent=True))

    def _sign(self, tenant: str, revisions: tuple[str, ...], half: int, certificate: int) -> bytes:
        content = msgspec.msgpack.encode(RevisionGrant(tenant, revisions, (half + 2) * GRANT_S / 2))
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
