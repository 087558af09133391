"""What the catalog keeps. Times are nanoseconds since the epoch, sizes bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts.base_model import BaseModel
from artifacts.names import AdapterName, RevisionName


@dataclass(frozen=True, slots=True)
class Blob:
    """A file's content."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter; `aliases` map to revisions' digests, `etag` changes with every change of it."""

    name: AdapterName
    base_model: str
    aliases: Mapping[str, str]
    create_ns: int
    update_ns: int
    etag: str


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision; `order` grows with every revision of the store."""

    name: RevisionName
    base_model: str
    base_digest: str
    rank: int
    config: Blob
    weights: Blob
    create_ns: int
    order: int


@dataclass(frozen=True, slots=True)
class NewRevision:
    """A validated upload, before it is kept. `alias` None moves none; an empty `etag` goes with any."""

    name: RevisionName
    base_model: str
    base_digest: str
    rank: int
    config: Blob
    weights: Blob
    alias: str | None
    etag: str


@dataclass(frozen=True, slots=True)
class Base:
    """A registered base model; the manifest's own `files` are empty, theirs are blobs."""

    manifest: BaseModel
    files: Mapping[str, Blob]
    create_ns: int


@dataclass(frozen=True, slots=True)
class NewBase:
    """A checked registration, before it is kept. `replace` lets it take the place of one that differs."""

    manifest: BaseModel
    files: Mapping[str, Blob]
    replace: bool
