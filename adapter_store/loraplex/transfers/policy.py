"""The operator's file of sources: which prefixes a tenant may import from, with which credentials.

[[source]]
prefix = "s3://acme-adapters/lora"     # everything below it
tenants = ["acme"]                     # default: every tenant
credentials = "acme-s3"                # default: none
identity = true                        # s3, gs and az: as the store's own account, in place of credentials
endpoint = "https://s3.example.com"    # default: the provider's own, or the registry that the URI names
region = "eu-central-1"                # s3 alone
realm = "https://auth.example.com"     # oci alone: the host beside the registry's own that gets the credentials
allow_private = true                   # default: addresses of private networks are refused
export = true                          # default: nothing is exported there

[credentials.acme-s3]                  # each value is in a file or in a variable, never here
access_key_id_env = "ACME_KEY_ID"
secret_access_key_file = "/run/secrets/acme-s3"

Of several prefixes that match, the longest one counts.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.names import check_tenant
from loraplex.runtime.files import FollowedFiles
from loraplex.runtime.rpc.errors import InvalidField, PermissionDenied, Unavailable
from loraplex.runtime.rpc.settings import SettingsError

# The values of credentials that a scheme takes.
CREDENTIALS: Mapping[str, tuple[str, ...]] = {
    "hf": ("token",),
    "oci": ("username", "password"),
    "s3": ("access_key_id", "secret_access_key", "session_token"),
    "gs": ("service_account_key",),
    "az": ("account_name", "account_key", "sas_key"),
    "file": (),
}
# The schemes whose places may know the store by an identity of its own.
BUCKETS = ("s3", "gs", "az")
EXAMPLES = (
    "hf://ORG/REPO[@REVISION][/FOLDER], s3://BUCKET/FOLDER, gs://, az://, oci://REGISTRY/REPO:TAG, file:///FOLDER"
)
# Maximum characters of a URI.
_URI_CHARACTERS = 1024
_URI = re.compile(r"([a-z0-9]+)://([^/]*)((?:/[^/]+)*)/?")
_PLAIN = re.compile(r"[A-Za-z0-9._~:@+=, /-]*")
_AUTHORITY = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?")


class SourcesError(SettingsError):
    """A file of sources that cannot be used; the message is one line that names the table and the field."""


@dataclass(frozen=True, slots=True)
class SourceUri:
    """A source's URI in parts; `path` has neither a slash at its ends nor a segment that means another folder."""

    scheme: str
    authority: str
    path: str

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(part for part in (self.authority, self.path) if part or not self.authority)}"


@dataclass(frozen=True, slots=True)
class Rule:
    """A prefix that some tenants may import from. Empty `tenants`: all of them."""

    prefix: SourceUri
    tenants: frozenset[str] = frozenset()
    credentials: str = ""
    # With what the store's process itself may do: a service account's identity, or the provider's variables.
    identity: bool = False
    endpoint: str = ""
    region: str = ""
    realm: str = ""
    allow_private: bool = False
    export: bool = False
    # Where each value of the credentials is read: ("file" or "env", its name).
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def matches(self, uri: SourceUri, tenant: str) -> bool:
        """Tell whether the rule is for the URI and the tenant."""
        text, prefix = str(uri), str(self.prefix)
        # A revision follows a hub's repository, a tag or digest a registry's; elsewhere @ and : are parts of names.
        ends = "/" + {"hf": "@", "oci": "@:"}.get(uri.scheme, "") if self.prefix.path else "/"
        below = text == prefix or (text.startswith(prefix) and text[len(prefix)] in ends)
        return below and (not self.tenants or tenant in self.tenants)

    def read_secrets(self) -> dict[str, str]:
        """Read the current values of the credentials. Raises Unavailable, which contains no value."""
        values = {}
        for name, (kind, place) in self.secrets.items():
            try:
                values[name] = Path(place).read_text(encoding="utf-8").strip() if kind == "file" else os.environ[place]
            except (OSError, KeyError, UnicodeDecodeError) as error:
                message = f"the store cannot read {name} of its credentials {self.credentials}; tell an operator"
                raise Unavailable(message, reason="SOURCE_CREDENTIALS", retry_after_s=60.0) from error
        return values


def parse_uri(text: str, at: str = "source") -> SourceUri:
    """Parse a URI. Raises InvalidField of `at`."""
    matched = _URI.fullmatch(text)
    if matched is None or len(text) > _URI_CHARACTERS or matched[1] not in CREDENTIALS:
        raise InvalidField(at, f"{text[:100]!r} is not a source; write {EXAMPLES}")
    scheme, authority, path = matched[1], matched[2], matched[3].strip("/")
    if "@" in authority:
        raise InvalidField(at, "has credentials in it; an operator gives them to the store, in the file of --sources")
    if not _PLAIN.fullmatch(text) or {".", ".."} & set(path.split("/")):
        raise InvalidField(at, "has '.', '..', a query or an escape in its path; write the path itself")
    if scheme == "file":
        if authority or not path:
            raise InvalidField(at, f"{text!r}: write file:///FOLDER, a folder of the store's machine")
    elif not _AUTHORITY.fullmatch(authority) or (scheme != "oci" and ":" in authority):
        raise InvalidField(at, f"{text[:100]!r} does not name a place; write {EXAMPLES}")
    return SourceUri(scheme, authority, path)


class Sources:
    """The sources that tenants may use; none without a file. Raises SourcesError."""

    def __init__(self, path: Path | None) -> None:
        self._file = (
            None if path is None else FollowedFiles(f"--sources {path}", [path], lambda: _read(path), SourcesError)
        )

    def rule(self, uri: SourceUri, tenant: str, *, export: bool = False) -> Rule:
        """Return the rule of a URI for a tenant. Raises PermissionDenied where there is none."""
        if self._file is not None:
            self._file.look()
            found = [rule for rule in self._file.content if rule.matches(uri, tenant) and (rule.export or not export)]
            if found:
                return max(found, key=lambda rule: len(str(rule.prefix)))
        what = "export to" if export else "import from"
        message = f"{tenant} may not {what} {uri}: an operator allows its prefix in the file of the store's --sources"
        raise PermissionDenied(message, "SOURCE_NOT_ALLOWED")


def _read(path: Path) -> tuple[Rule, ...]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        if unknown := sorted(set(tables) - {"source", "credentials"}):
            raise SourcesError(f"{unknown[0]}: write [[source]] or [credentials.NAME]")
        credentials = tables.get("credentials", {})
        return tuple(_rule(f"source {at}", table, credentials) for at, table in enumerate(tables.get("source", []), 1))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SourcesError(f"--sources {path}: no TOML: {error}") from error
    except SourcesError as error:
        raise SourcesError(f"--sources {path}: {error}") from error


_KINDS = {"prefix": str, "tenants": list, "credentials": str, "endpoint": str, "region": str, "realm": str}
_FIELDS = {each.name: _KINDS.get(each.name, bool) for each in fields(Rule) if each.name != "secrets"}


def _rule(at: str, table: Any, credentials: Any) -> Rule:
    if not isinstance(table, dict) or not isinstance(credentials, dict):
        raise SourcesError(f"{at}: write [[source]] and [credentials.NAME]")
    for name, value in table.items():
        if name not in _FIELDS:
            raise SourcesError(f"{at}: {name}: not a field of a source ({', '.join(_FIELDS)})")
        if not isinstance(value, _FIELDS[name]):
            raise SourcesError(f"{at}: {name}: {value!r} is not a {_FIELDS[name].__name__}")
    try:
        prefix = parse_uri(table.get("prefix", ""), f"{at}: prefix")
        tenants = frozenset(check_tenant(tenant) for tenant in table.get("tenants", []))
    except (InvalidField, ArtifactError) as error:
        raise SourcesError(f"{at}: {error}") from error
    if "tenants" in table and not tenants:
        raise SourcesError(f"{at}: tenants: empty; leave it out for every tenant")
    for name in ("endpoint", "realm"):
        if not (url := table.get(name, "https://")).startswith(("https://", "http://")):
            raise SourcesError(f"{at}: {name}: {url!r} is not a URL like https://HOST")
    named = table.get("credentials", "")
    if table.get("identity") and (named or prefix.scheme not in BUCKETS):
        raise SourcesError(f"{at}: identity: in place of credentials, and of {', '.join(BUCKETS)} alone")
    secrets = _secrets(named, prefix.scheme, credentials) if named else {}
    return Rule(**{**table, "prefix": prefix, "tenants": tenants, "secrets": secrets})


def _secrets(name: str, scheme: str, credentials: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    if not isinstance(table := credentials.get(name), dict):
        raise SourcesError(f"credentials.{name}: missing")
    secrets = {}
    for key, place in table.items():
        value, _, kind = key.rpartition("_")
        if value not in CREDENTIALS[scheme] or kind not in {"file", "env"}:
            takes = ", ".join(f"{one}_file or {one}_env" for one in CREDENTIALS[scheme]) or "no credentials"
            raise SourcesError(f"credentials.{name}: {key}: {scheme}:// takes {takes}")
        if not isinstance(place, str):
            raise SourcesError(f"credentials.{name}: {key}: {place!r} is not a name")
        secrets[value] = kind, place
    return secrets
