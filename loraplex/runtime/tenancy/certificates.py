"""Client certificates as credentials: the URI among the certificate's names says who the caller is.

loraplex://tenant/acme          role tenant-user of acme            loraplex://operator/NAME    an operator
loraplex://tenant-admin/acme    role tenant-admin of acme           loraplex://auditor/NAME     an auditor
loraplex://trainer/acme         role trainer of acme
loraplex://router/NAME, loraplex://worker/NAME, loraplex://store/NAME: parts of the cluster

gRPC has checked that an authority of --tls-ca signed the certificate before a call comes here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from loraplex.runtime.rpc.principal import TENANT_ROLES, CredentialKind, Principal, Role
from loraplex.runtime.rpc.tls import TlsFiles
from loraplex.runtime.tenancy.api_keys import bad_credential
from loraplex.runtime.tenancy.guard import AuthContext, Metadata, is_tenant

if TYPE_CHECKING:  # a process without TLS starts without it
    from cryptography import x509

SCHEME = "loraplex://"
_PEM = "x509_pem_cert"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ROLES = {"tenant": Role.TENANT_USER} | {role.value: role for role in Role if role is not Role.TENANT_USER}
# Tenants that no credential may be of.
RESERVED_TENANTS = frozenset({"shared"})


class CertificateReader:
    """Reads the client's certificate."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now

    def read(self, metadata: Metadata, auth_context: AuthContext) -> Principal | None:
        """Return the caller; None where the connection has no client certificate. Raises Unauthenticated."""
        pem = next(iter(auth_context.get(_PEM, ())), b"")
        if not pem:
            return None
        principal = principal_of(pem)
        if principal is None:
            raise bad_credential(f"the certificate names nobody: it needs one URI like {SCHEME}tenant/NAME")
        if principal.expires_at is not None and self._now() >= principal.expires_at:  # a connection that outlived it
            raise bad_credential("the certificate has expired", "CREDENTIAL_EXPIRED", principal)
        return principal


@lru_cache(maxsize=4096)
def principal_of(pem: bytes) -> Principal | None:
    """Return the principal that a certificate names; None if it names none or several."""
    from cryptography import x509

    try:
        return principal_in(x509.load_pem_x509_certificate(pem))
    except ValueError:
        return None


@lru_cache(maxsize=16)
def end_of(cert: bytes, ca: bytes = b"") -> float:
    """Return when the first of a certificate, its chain and the authority in `ca` ends, in seconds since 1970."""
    from cryptography import x509

    chain = x509.load_pem_x509_certificates(cert)
    authorities = x509.load_pem_x509_certificates(ca) if ca else []
    signers = [one for one in authorities if _has_signed(one, chain[-1])]
    ends = [one.not_valid_after_utc for one in chain]
    if signers:  # a successor of the same key may be among them
        ends.append(max(one.not_valid_after_utc for one in signers))
    return min(ends).timestamp()


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def principal_in(certificate: x509.Certificate) -> Principal | None:
    """Return the principal that a parsed certificate names; None if it names none or several."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return None
    ours = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(ours) != 1:
        return None
    kind, _, name = ours[0].removeprefix(SCHEME).partition("/")
    role = _ROLES.get(kind)
    if role is None or not _NAME.fullmatch(name):
        return None
    tenant = name if role in TENANT_ROLES else ""
    if role in TENANT_ROLES and (not is_tenant(name) or name in RESERVED_TENANTS):
        return None
    return Principal(
        name=f"{kind}/{name}",
        roles=frozenset({role}),
        kind=CredentialKind.CERTIFICATE,
        tenant=tenant,
        expires_at=certificate.not_valid_after_utc.timestamp(),
        subject=f"{kind}/{name}",
    )


def own_name(tls: TlsFiles, role: Role) -> str:
    """Return the NAME of a process's own certificate. Raises ValueError where that names another role."""
    principal = principal_of(tls.content.cert)
    if principal is None or role not in principal.roles:
        who = "nobody" if principal is None else principal.name
        raise ValueError(f"--tls-cert: the certificate names {who}; it needs the URI {SCHEME}{role.value}/NAME")
    return principal.name.partition("/")[2]


def below(owner: str, name: str) -> str:
    """Return a name that belongs to the holder of a certificate: `name` itself, or with the owner's before it."""
    return name if belongs(owner, name) else f"{owner}/{name}"


def belongs(owner: str, name: str) -> bool:
    """Tell whether a name is its owner's NAME, or begins with it and a slash, which no NAME has."""
    return name == owner or name.startswith(owner + "/")
