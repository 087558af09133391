"""Records of the catalog, and how they are read from its rows. Times are nanoseconds since 1970, sizes bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.fitness import CalibrationFigures, Figures, FitnessLimits
from loraplex.contracts.artifacts.names import AdapterName, RevisionName
from loraplex.runtime.rpc.errors import NotFound

REVISIONS = (
    "SELECT revisions.*, tenant, adapter, base_model, provenance.origin FROM revisions "
    "JOIN adapters ON adapters.id = revisions.adapter_id LEFT JOIN provenance USING (adapter_id, digest) "
)
# The tables of statements, by the figures that their rows have.
STATEMENTS: dict[type, str] = {Figures: "certificates", CalibrationFigures: "calibrations"}
F = TypeVar("F", Figures, CalibrationFigures)
# The digests of an adapter's aliases, as JSON.
ALIASES = "(SELECT json_group_object(alias, digest) FROM aliases WHERE adapter_id = adapters.id)"
_BY_DIGESTS = (
    "SELECT revisions.digest, tenant, adapter, NULL AS delete_ns, (SELECT json_group_array(alias) "
    "FROM aliases WHERE aliases.adapter_id = adapters.id AND aliases.digest = revisions.digest) AS aliases "
    "FROM revisions JOIN adapters ON adapters.id = adapter_id "
    "WHERE revisions.digest IN ({0}) UNION ALL "
    "SELECT digest, tenant, adapter, delete_ns, '[]' FROM deleted_revisions "
    "WHERE digest IN ({0}) ORDER BY 1, 2, 3, 4"
)


# A row: its values in order, or by the name of their column.
Row = Any


class Rows(Protocol):
    """The catalog's rows within a transaction: runs statements, whose values are `?` or `:name`, as sqlite3 does.

    Statements are of what SQLite and PostgreSQL both take; the functions of two arguments max() and json_extract() too.
    """

    def execute(self, sql: str, parameters: Any = (), /) -> Any: ...

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> object: ...


def marks(values: Sequence[object]) -> str:
    """Return a `?` for each of the values."""
    return ", ".join("?" * len(values)) or "NULL"


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
class Statement(Generic[F]):
    """The figures of a revision on one quantization of the base model that it was validated against."""

    quantization: str
    base_digest: str
    figures: F
    create_ns: int


@dataclass(frozen=True, slots=True)
class FitnessPolicy:
    """The limits of the store, and whether an adapter beyond them is refused on such a base instead of warned of."""

    limits: FitnessLimits
    refuses: bool


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source. `etag`, `version` and `sha256` (hexadecimal) are empty where the source does not say them."""

    path: str
    size: int
    etag: str = ""
    version: str = ""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of an imported revision: the requested URI, and the exact version that it named.

    `pin` is a URI of these bytes alone, where the source has one: a commit, a digest; the files have their versions.
    """

    uri: str
    pin: str
    files: tuple[SourceFile, ...]
    fetch_ns: int = 0


@dataclass(frozen=True, slots=True)
class Revision:
    """A revision. `order` grows with every revision of the store; one that is not kept yet has no time and order."""

    name: RevisionName
    base_model: str
    base_digest: str
    rank: int
    config: Blob
    weights: Blob
    create_ns: int | None = None
    order: int = 0
    certificates: tuple[Statement[Figures], ...] = ()
    calibrations: tuple[Statement[CalibrationFigures], ...] = ()
    provenance: Provenance | None = None
    # When it ends by itself; None: never.
    expire_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A revision that is rolled out in the place of the live one, and where its rollout is."""

    revision: Revision
    release: str
    step: int
    permille: int
    shadow_permille: int
    refusal_phrases: tuple[str, ...]
    # The secret key of the hash that splits requests.
    split_key: str


@dataclass(frozen=True, slots=True)
class FoundRevision:
    """A revision that was looked for by its digest. `delete_ns` None: its adapter was not deleted."""

    name: RevisionName
    aliases: tuple[str, ...]
    delete_ns: int | None


@dataclass(frozen=True, slots=True)
class NewRevision:
    """A validated upload before it is kept.

    `alias` None moves no alias; an empty `etag` matches any; an empty `key_id`: the upload came without an API key.
    """

    revision: Revision
    alias: str | None
    etag: str
    key_id: str
    # Warnings for the owner: the adapter is served all the same.
    warnings: tuple[str, ...] = ()
    # Its life in seconds; None: until its adapter is deleted.
    ttl_s: float | None = None
    # An alias that means another revision refuses it.
    keep_alias: bool = False


@dataclass(frozen=True, slots=True)
class Base:
    """A revision of a base model: live, staged or former. The manifest's own `files` are empty: the files are blobs."""

    manifest: BaseModel
    files: Mapping[str, Blob]
    create_ns: int
    state: str


@dataclass(frozen=True, slots=True)
class NewBase:
    """A checked registration before it is kept.

    Where the name's live revision differs, `replace` makes this one live, and `stage` keeps it beside that one.
    """

    manifest: BaseModel
    files: Mapping[str, Blob]
    replace: bool
    stage: bool


def find_adapter(rows: Rows, name: AdapterName) -> Row | None:
    selected = rows.execute("SELECT * FROM adapters WHERE tenant = ? AND adapter = ?", (name.tenant, name.adapter))
    row: Row | None = selected.fetchone()
    return row


def adapter_row(rows: Rows, name: AdapterName) -> Row:
    row = find_adapter(rows, name)
    if row is None:
        raise NotFound("adapter", str(name))
    return row


def to_adapter(rows: Rows, row: Row) -> Adapter:
    aliases = rows.execute(f"SELECT {ALIASES} FROM adapters WHERE id = ?", (row["id"],)).fetchone()[0]
    return with_aliases(row, aliases)


def with_aliases(row: Row, aliases: str | None) -> Adapter:
    """Return the adapter of a row, with its aliases as ALIASES selects them."""
    return Adapter(
        name=AdapterName(row["tenant"], row["adapter"]),
        base_model=row["base_model"],
        aliases=dict(sorted(json.loads(aliases or "{}").items())),
        create_ns=row["create_ns"],
        update_ns=row["update_ns"],
        etag=etag_of(row),
    )


def etag_of(row: Row) -> str:
    # An adapter deleted and made again has another id.
    return f"{row['id']}-{row['changes']}"


def find_revision(rows: Rows, name: RevisionName) -> Revision | None:
    row = rows.execute(
        REVISIONS + "WHERE tenant = ? AND adapter = ? AND revisions.digest = ?",
        (name.tenant, name.adapter, name.digest),
    ).fetchone()
    return None if row is None else to_revision(row, rows)


def read_revision(rows: Rows, name: RevisionName) -> Revision:
    revision = find_revision(rows, name)
    if revision is None:
        raise NotFound("revision", str(name))
    return revision


def find_by_digests(rows: Rows, digests: Sequence[str]) -> list[FoundRevision]:
    """Return the revisions of these digests, deleted ones included, in order of digest and adapter."""
    return [
        FoundRevision(
            RevisionName(row["tenant"], row["adapter"], row["digest"]),
            tuple(sorted(json.loads(row["aliases"] or "[]"))),
            row["delete_ns"],
        )
        for row in rows.execute(_BY_DIGESTS.format(marks(digests)), (*digests, *digests))
    ]


def statements_of(rows: Rows, revision: Row, kind: type[F]) -> tuple[Statement[F], ...]:
    """Return the statements of a kind about a revision that were made with its base model."""
    columns = [field.name for field in fields(kind)]
    selected = rows.execute(
        f"SELECT quantization, base_digest, create_ns, {', '.join(columns)} FROM {STATEMENTS[kind]} "
        "WHERE adapter_id = ? AND digest = ? AND base_digest = ? ORDER BY quantization",
        (revision["adapter_id"], revision["digest"], revision["base_digest"]),
    )
    return tuple(Statement(row[0], row[1], kind(**{name: row[name] for name in columns}), row[2]) for row in selected)


def to_revision(row: Row, rows: Rows | None = None) -> Revision:
    """Return the revision of a row, with the statements about it that `rows` have."""
    more = dict(row)  # deleted revisions have neither origin nor end
    return Revision(
        name=RevisionName(row["tenant"], row["adapter"], row["digest"]),
        base_model=row["base_model"],
        base_digest=row["base_digest"],
        rank=row["rank"],
        config=Blob(row["config_digest"], row["config_bytes"]),
        weights=Blob(row["weights_digest"], row["weights_bytes"]),
        create_ns=row["create_ns"],
        order=row["number"],
        certificates=statements_of(rows, row, Figures) if rows else (),
        calibrations=statements_of(rows, row, CalibrationFigures) if rows else (),
        provenance=msgspec.json.decode(origin, type=Provenance) if (origin := more.get("origin")) else None,
        expire_ns=more.get("expire_ns"),
    )
