"""Client certificates as credentials: the URI among the certificate's names says who the caller is.

loraplex://tenant/acme          role tenant-user of acme            loraplex://operator/NAME    an operator
loraplex://tenant-admin/acme    role tenant-admin of acme           loraplex://auditor/NAME     an auditor
loraplex://router/NAME, loraplex://worker/NAME, loraplex://store/NAME: parts of the cluster

gRPC has checked that an authority of --tls-ca signed the certificate before a call comes here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import lru_cache

from cryptography import x509

from rpc.identity.api_keys import bad_credential
from rpc.identity.principal import TENANT_ROLES, CredentialKind, Principal, Role
from rpc.identity.tenant_header import AuthContext, Metadata, is_tenant

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
            raise bad_credential("the certificate has expired", "CREDENTIAL_EXPIRED")
        return principal


@lru_cache(maxsize=4096)
def principal_of(pem: bytes) -> Principal | None:
    """Return whom a certificate names; None where it names nobody, or several."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, x509.ExtensionNotFound):
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
    )
