"""Names of adapters, revisions, aliases and base models: how they are written, and what they may contain.

tenants/acme/adapters/support                       an adapter
tenants/acme/adapters/support/revisions/sha256:...  one of its revisions
support, support@canary, support@sha256:...         in a request: the tenant's own adapter, or the shared one
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from artifacts.digests import is_digest
from artifacts.errors import ArtifactError

# The tenant whose adapters every tenant may use.
SHARED = "shared"
# The alias of a reference that gives neither alias nor digest.
LIVE = "live"

_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADAPTER = re.compile(r"tenants/([^/]*)/adapters/([^/]*)")
_REVISION = re.compile(r"(tenants/[^/]*/adapters/[^/]*)/revisions/([^/]*)")
_PART_RULE = "1 to 63 lower-case letters, digits, '-', '_' and '.', beginning with a letter or digit"


@dataclass(frozen=True, slots=True, order=True)
class AdapterName:
    """The full name of an adapter."""

    tenant: str
    adapter: str

    def __str__(self) -> str:
        return f"tenants/{self.tenant}/adapters/{self.adapter}"


@dataclass(frozen=True, slots=True, order=True)
class RevisionName:
    """The full name of an immutable revision of an adapter."""

    tenant: str
    adapter: str
    digest: str

    def __str__(self) -> str:
        return f"{self.adapter_name}/revisions/{self.digest}"

    @property
    def adapter_name(self) -> AdapterName:
        """Return the name of the revision's adapter."""
        return AdapterName(self.tenant, self.adapter)


@dataclass(frozen=True, slots=True)
class Reference:
    """The adapter that a request names: the first candidate that exists, at `digest`, or else at `alias`."""

    candidates: tuple[AdapterName, ...]
    alias: str
    digest: str | None


def check_tenant(tenant: str) -> str:
    """Return the tenant's name if it is allowed. Raises ArtifactError("tenant")."""
    return _check_part("tenant", tenant)


def check_alias(alias: str) -> str:
    """Return the alias if it is allowed. Raises ArtifactError("alias")."""
    return _check_part("alias", alias)


def check_base_name(name: str) -> str:
    """Return a base model's name if it is allowed. Raises ArtifactError("model")."""
    if not _BASE.fullmatch(name):
        rule = "1 to 128 letters, digits, '-', '_' and '.', beginning with a letter or digit"
        raise ArtifactError("model", f"{name!r} is not a base model's name: {rule}")
    return name


def parse_adapter_name(text: str, tenant: str) -> AdapterName:
    """Parse a full name, or a short one of the tenant's own, without alias or digest. Raises ArtifactError."""
    if "/" not in text:
        return AdapterName(check_tenant(tenant), _check_part("adapter", text))
    match = _ADAPTER.fullmatch(text)
    if match is None:
        raise ArtifactError("adapter", f"{text!r} is not a name like tenants/TENANT/adapters/ADAPTER")
    return AdapterName(check_tenant(match[1]), _check_part("adapter", match[2]))


def parse_revision_name(text: str) -> RevisionName:
    """Parse a revision's full name. Raises ArtifactError."""
    match = _REVISION.fullmatch(text)
    if match is None or not is_digest(match[2]):
        raise ArtifactError(
            "revision", f"{text!r} is not a name like tenants/TENANT/adapters/ADAPTER/revisions/sha256:64-HEX-DIGITS"
        )
    adapter = parse_adapter_name(match[1], "")
    return RevisionName(adapter.tenant, adapter.adapter, match[2])


def parse_reference(text: str, tenant: str) -> Reference:
    """Parse NAME, NAME@ALIAS or NAME@sha256:... as `tenant` writes it, NAME short or full. Raises ArtifactError."""
    name, at, suffix = text.partition("@")
    adapter = parse_adapter_name(name, tenant)
    candidates: tuple[AdapterName, ...] = (adapter,)
    if "/" not in name and tenant != SHARED:
        candidates = (adapter, AdapterName(SHARED, adapter.adapter))
    if not at:
        return Reference(candidates, LIVE, None)
    if suffix.startswith("sha256:"):
        if not is_digest(suffix):
            raise ArtifactError("adapter", f"{suffix!r} is not a digest: sha256: and 64 lower-case hexadecimal digits")
        return Reference(candidates, LIVE, suffix)
    return Reference(candidates, _check_part("adapter", suffix), None)


def _check_part(subject: str, text: str) -> str:
    if not _PART.fullmatch(text):
        raise ArtifactError(subject, f"{text!r} is not allowed: {_PART_RULE}")
    return text
