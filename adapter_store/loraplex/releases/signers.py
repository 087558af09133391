"""Signers of adapters: whom operators trust for each tenant, and whether its revisions need a signature.

[acme]
keys = ["trainer.pub"]                  # PEM, beside this file
roots = ["ca.pem"]                      # instead or as well: the certificates of authorities, PEM
identities = ["trainer@acme.example"]   # whose certificates, by subject alternative or common name; any without it
required = true                         # the default: without a signature no revision gets an alias or a release

The table `default` is for tenants without one of their own; a tenant without any needs no signature.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loraplex.adapter_store.records import Revision
from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.contracts.plans import DEFAULT
from loraplex.releases.bundles import (
    TrustedKey,
    TrustedRoots,
    read_certificates,
    read_public_key,
    verify_files,
)
from loraplex.runtime.interpreter import StartError
from loraplex.runtime.rpc.errors import Mismatch

_FIELDS = {"keys", "roots", "identities", "required"}
_T = TypeVar("_T")


class SignersError(StartError):
    """A file of signers that cannot be read; the message is one line that names the table and the field."""


@dataclass(frozen=True, slots=True)
class _Rule:
    keys: tuple[TrustedKey, ...]
    roots: TrustedRoots | None
    required: bool


class Signers:
    """The rules of tenants; without any every revision passes unsigned."""

    def __init__(self, rules: Mapping[str, _Rule]) -> None:
        self._rules = rules

    def require(self, tenant: str) -> bool:
        """Return whether a tenant's revisions need a signature."""
        rule = self._of(tenant)
        return rule is not None and rule.required

    def check(self, revision: Revision, bundle: bytes) -> str:
        """Return the signer of a revision; empty where its tenant has no rule, or needs none and has none.

        Raises Mismatch on a signature that is missing or does not hold.
        """
        rule = self._of(revision.name.tenant)
        if rule is None or not (bundle or rule.required):
            return ""
        if not bundle:
            message = "its tenant's revisions need a signature: sign the directory with model-signing"
            raise Mismatch(str(revision.name), message, reason="SIGNATURE_MISSING")
        files = {CONFIG_FILE: revision.config.digest, WEIGHTS_FILE: revision.weights.digest}
        try:
            return verify_files(bundle, rule.keys, files, rule.roots)
        except ArtifactError as error:
            raise Mismatch(error.subject, error.message, reason="SIGNATURE_INVALID") from error

    def _of(self, tenant: str) -> _Rule | None:
        return self._rules.get(tenant) or self._rules.get(DEFAULT)


def read_signers(path: Path) -> Signers:
    """Read a file of signers. Raises SignersError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SignersError(f"--signers {path}: {error}") from error
    return Signers({tenant: _rule(path, tenant, values) for tenant, values in tables.items()})


def _rule(path: Path, tenant: str, values: Any) -> _Rule:
    where = f"--signers {path}: {tenant}"
    if not isinstance(values, dict):
        raise SignersError(f"{where} is not a table such as [{tenant}]")
    if unknown := values.keys() - _FIELDS:
        raise SignersError(f"{where}.{min(unknown)} is not one of {', '.join(sorted(_FIELDS))}")
    keys = _texts(where, values, "keys", "the names of files, such as ['trainer.pub'], or roots")
    names = _texts(where, values, "roots", "the names of files, such as ['ca.pem']")
    identities = _texts(where, values, "identities", "names in certificates, or leave it out for any")
    required = values.get("required", True)
    if not keys and not names:
        raise SignersError(f"{where}.keys: give the names of files, such as ['trainer.pub'], or roots")
    if identities and not names:
        raise SignersError(f"{where}.identities: they are those of certificates; give their roots, such as ['ca.pem']")
    if not isinstance(required, bool):
        raise SignersError(f"{where}.required: is neither true nor false")
    roots = None
    if names:
        files = _read(f"{where}.roots", path, names, read_certificates)
        roots = TrustedRoots(names, tuple(one for certificates in files for one in certificates), identities)
    return _Rule(_read(f"{where}.keys", path, keys, read_public_key), roots, required)


def _texts(where: str, values: Mapping[str, Any], field: str, expected: str) -> tuple[str, ...]:
    texts = values.get(field, ())
    if field in values and not (isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts)):
        raise SignersError(f"{where}.{field}: give {expected}")
    return tuple(texts)


def _read(where: str, path: Path, names: Iterable[str], read: Callable[[str, bytes], _T]) -> tuple[_T, ...]:
    try:
        return tuple(read(name, (path.parent / name).read_bytes()) for name in names)
    except OSError as error:
        raise SignersError(f"{where}: {error.filename}: {error.strerror}") from error
    except ArtifactError as error:
        raise SignersError(f"{where}: {path.parent / error.subject}: {error.message}") from error
