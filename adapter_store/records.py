"""Records of the catalog. Times are nanoseconds since 1970, sizes bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts.base_model import BaseModel
from artifacts.certificate import Figures
from artifacts.names import AdapterName, RevisionName


@dataclass(frozen=True, slots=True)
class Blob:
    """The content of a file, by its digest."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter. `aliases` map to digests of revisions; `etag` changes with every change of the adapter."""

    name: AdapterName
    base_model: str
    aliases: Mapping[str, str]
    create_ns: int
    update_ns: int
    etag: str


@dataclass(frozen=True, slots=True)
class FitnessCertificate:
    """The figures of a revision on one quantization of the base model that it was validated against."""

    quantization: str
    base_digest: str
    figures: Figures
    create_ns: int


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision. `order` grows with every revision of the store."""

    name: RevisionName
    base_model: str
    base_digest: str
    rank: int
    config: Blob
    weights: Blob
    create_ns: int
    order: int
    certificates: tuple[FitnessCertificate, ...] = ()


@dataclass(frozen=True, slots=True)
class NewRevision:
    """A validated upload before it is kept.

    `alias` None moves no alias; an empty `etag` matches any; an empty `key_id`: the upload came without an API key.
    """

    name: RevisionName
    base_model: str
    base_digest: str
    rank: int
    config: Blob
    weights: Blob
    alias: str | None
    etag: str
    key_id: str


@dataclass(frozen=True, slots=True)
class Base:
    """A registered base model. The manifest's own `files` are empty: the files are blobs."""

    manifest: BaseModel
    files: Mapping[str, Blob]
    create_ns: int


@dataclass(frozen=True, slots=True)
class NewBase:
    """A checked registration before it is kept. `replace` allows it to replace a model that differs."""

    manifest: BaseModel
    files: Mapping[str, Blob]
    replace: bool
