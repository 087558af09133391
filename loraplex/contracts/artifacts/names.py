"""Names of adapters, revisions, aliases and base models, and digests: how they are written, what they may contain.

tenants/acme/adapters/support                       an adapter
tenants/acme/adapters/support/revisions/sha256:...  one of its revisions
support, support@canary, support@sha256:...         in a request: the tenant's own adapter, or the shared one
Qwen/Qwen3-0.6B                                     a base model or an adapter may have a name as hubs have them
sha256:...                                          a digest, with 64 lower-case hexadecimal digits
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts import ArtifactError

# The tenant whose adapters every tenant may use.
SHARED = "shared"
# The alias of a reference that gives neither alias nor digest.
LIVE = "live"

_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PART_RULE = "1 to 63 lower-case letters, digits, '-', '_' and '.', beginning with a letter or digit"
# Beginning of the full names of adapters and revisions.
_FULL = "tenants/"
# A hub's name: an owner may come first. No owner is called `tenants`, with which full names begin.
_HUB = re.compile(r"(?:(?!tenants/)[A-Za-z0-9][A-Za-z0-9._-]{0,62}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HUB_RULE = "letters, digits, '-', '_' and '.', beginning with a letter or digit; an owner and '/' may come first"
# Maximum length in characters of a base model's name, and of an adapter's.
_HUB_CHARACTERS = 128
_ADAPTER = re.compile(r"tenants/([^/]*)/adapters/([^/]*(?:/[^/]*)?)")
_REVISION = re.compile(r"(tenants/[^/]*/adapters/[^/]*(?:/[^/]*)?)/revisions/([^/]*)")
DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Size in bytes of the pieces in which a file is read.
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class AdapterName:
    """The full name of an adapter."""

    tenant: str
    adapter: str

    def __str__(self) -> str:
        return f"tenants/{self.tenant}/adapters/{self.adapter}"


# Names that HTTP clients of servers with one model give it, so that no adapter may have them.
ANY_MODEL = ("tgi", "dummy")


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

    @property
    def tenants(self) -> str:
        """Return the candidates' tenants, in words."""
        return " and ".join(f"tenant {name.tenant}" for name in self.candidates)


def check_tenant(tenant: str) -> str:
    """Return the tenant's name if it is allowed. Raises ArtifactError("tenant")."""
    return _check_part("tenant", tenant)


def check_alias(alias: str) -> str:
    """Return the alias if it is allowed. Raises ArtifactError("alias")."""
    return _check_part("alias", alias)


def check_base_name(name: str) -> str:
    """Return a base model's name if it is allowed. Raises ArtifactError("model")."""
    return _check_hub("model", name)


def parse_adapter_name(text: str, tenant: str) -> AdapterName:
    """Parse a full name, or a short one of the tenant's own, without alias or digest. Raises ArtifactError."""
    if not text.startswith(_FULL):
        return AdapterName(check_tenant(tenant), _check_hub("adapter", text))
    match = _ADAPTER.fullmatch(text)
    if match is None:
        raise ArtifactError("adapter", f"{text!r} is not a name like tenants/TENANT/adapters/ADAPTER")
    return AdapterName(check_tenant(match[1]), _check_hub("adapter", match[2]))


def parse_revision_name(text: str) -> RevisionName:
    """Parse a revision's full name. Raises ArtifactError."""
    match = _REVISION.fullmatch(text)
    if match is None or not is_digest(match[2]):
        raise ArtifactError(
            "revision", f"{text!r} is not a name like tenants/TENANT/adapters/ADAPTER/revisions/sha256:64-HEX-DIGITS"
        )
    adapter = parse_adapter_name(match[1], "")
    return RevisionName(adapter.tenant, adapter.adapter, match[2])


def adapter_of(text: str) -> str:
    """Return the adapter's name in a reference or full name, without its tenant, alias and digest."""
    name = text.partition("@")[0]
    return name.split("/", 3)[3] if name.startswith(_FULL) else name


def parse_reference(text: str, tenant: str) -> Reference:
    """Parse NAME, NAME@ALIAS or NAME@sha256:... as `tenant` writes it, NAME short or full. Raises ArtifactError."""
    name, at, suffix = text.partition("@")
    adapter = parse_adapter_name(name, tenant)
    candidates: tuple[AdapterName, ...] = (adapter,)
    if not name.startswith(_FULL) and tenant != SHARED:
        candidates = (adapter, AdapterName(SHARED, adapter.adapter))
    if not at:
        return Reference(candidates, LIVE, None)
    if suffix.startswith("sha256:"):
        if not is_digest(suffix):
            raise ArtifactError("adapter", f"{suffix!r} is not a digest: sha256: and 64 lower-case hexadecimal digits")
        return Reference(candidates, LIVE, suffix)
    return Reference(candidates, _check_part("adapter", suffix), None)


def _check_hub(subject: str, text: str) -> str:
    if not _HUB.fullmatch(text) or len(text) > _HUB_CHARACTERS:
        raise ArtifactError(subject, f"{text!r} is not allowed: 1 to {_HUB_CHARACTERS} {_HUB_RULE}")
    return text


def _check_part(subject: str, text: str) -> str:
    if not _PART.fullmatch(text):
        raise ArtifactError(subject, f"{text!r} is not allowed: {_PART_RULE}")
    return text


def sha256_bytes(data: bytes) -> str:
    """Return the digest of bytes."""
    return DIGEST_PREFIX + hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path) -> str:
    """Return the digest of a file's bytes. Raises OSError."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            sha256.update(piece)
    return DIGEST_PREFIX + sha256.hexdigest()


def sha256_json(value: Any) -> str:
    """Return the digest of a value's JSON: sorted keys, no spaces, ASCII. Raises ValueError on NaN and infinity."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return sha256_bytes(text.encode("ascii"))


def weighted_digest(parts: Iterable[tuple[str, float]]) -> str:
    """Return the digest of a weighted set of adapters: over its sorted (digest, weight) pairs.

    Weights are rounded to 32 bits, as on the wire. Raises ValueError on NaN and infinity.
    """
    pairs = sorted([digest, array("f", [weight])[0]] for digest, weight in parts)
    return sha256_json({"format": 1, "weighted": pairs})


def is_digest(text: str) -> bool:
    """Return whether the text is a digest."""
    return _DIGEST.fullmatch(text) is not None
