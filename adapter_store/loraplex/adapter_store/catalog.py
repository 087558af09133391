"""Adapters with their revisions, aliases and certificates.

Every change is one transaction; blobs come before it, and go after it. Blocks: call it in a thread. Tenants are the
caller's to check: the catalog knows only names.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Protocol

import msgspec

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.deleted import DeletedRevisions
from loraplex.adapter_store.grants import LIVE_GRANT, end_grants
from loraplex.adapter_store.plans import StoreQuotas
from loraplex.adapter_store.records import (
    ALIASES,
    REVISIONS,
    STATEMENTS,
    Adapter,
    Candidate,
    FoundRevision,
    NewRevision,
    Revision,
    Row,
    Rows,
    Statement,
    adapter_row,
    etag_of,
    find_adapter,
    find_by_digests,
    find_revision,
    marks,
    read_revision,
    statements_of,
    to_adapter,
    to_revision,
    with_aliases,
)
from loraplex.adapter_store.storage import BlobReader, DataDirectory, Keep, Upload
from loraplex.contracts.artifacts.names import LIVE, SHARED, AdapterName, Reference, RevisionName
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.rpc.errors import (
    Aborted,
    AlreadyExists,
    Exhausted,
    InvalidField,
    Mismatch,
    NotFound,
    PermissionDenied,
)
from loraplex.runtime.rpc.principal import only_trains

# Revisions whose time has passed, and that neither an alias nor a release that has not ended has.
_EXPIRED = """
SELECT number, adapter_id, digest, tenant, adapter FROM revisions JOIN adapters ON adapters.id = adapter_id
WHERE expire_ns <= ?
AND NOT EXISTS (SELECT 1 FROM aliases WHERE aliases.adapter_id = adapters.id AND aliases.digest = revisions.digest)
AND NOT EXISTS (
    SELECT 1 FROM releases WHERE releases.adapter_id = adapters.id AND releases.digest = revisions.digest
    AND state NOT IN ('retired', 'rolled back')
) ORDER BY number
"""
# Maximum number of quantizations for which a revision has certificates, or calibrations.
_QUANTIZATIONS = 32
# Maximum number of aliases of an adapter, so that one answer can list them.
_MAX_ALIASES = 100


class RevisionReleases(Protocol):
    """The releases of revisions, which are at the edge: loraplex.releases."""

    def check_alias(self, tenant: str) -> None:
        """Raise Mismatch where an upload may not move an alias, since its signature is checked after it."""

    def check_signed(self, rows: Rows, adapter_id: int, revision: RevisionName) -> None:
        """Raise Mismatch where a revision may have no alias, since its tenant's need a signature."""

    def candidate(self, rows: Rows, live: RevisionName) -> Candidate | None:
        """Return what is rolled out in the place of a revision."""

    def live_moved(self, rows: Rows, adapter_id: int, digest: str) -> None:
        """Note that `live` was moved by other means than a release; an empty digest: it was removed."""


class Catalog:
    """Adapters of all tenants, with what belongs to each."""

    def __init__(
        self,
        database: Database,
        data: DataDirectory,
        deleted: DeletedRevisions,
        quotas: StoreQuotas,
        releases: RevisionReleases,
    ) -> None:
        self._database = database
        self.changes = database.adapter_changes
        self._data = data
        self.deleted = deleted
        self.quotas = quotas
        self._releases = releases

    def resolve(self, reference: Reference, asked: str) -> tuple[Adapter, Revision, Candidate | None]:
        """Return the first adapter that exists, its revision, and what is rolled out in the place of a live one.

        Raises NotFound with the text `asked` for.
        """
        with self._database.reading() as rows:
            row = next((row for name in reference.candidates if (row := find_adapter(rows, name))), None)
            if row is None:
                raise NotFound("adapter", asked, hint=f"looked in {reference.tenants}")
            adapter = to_adapter(rows, row)
            if not (digest := reference.digest or adapter.aliases.get(reference.alias)):
                hint = f"its aliases: {', '.join(adapter.aliases) or 'none'}"
                raise NotFound("alias", f"{adapter.name}@{reference.alias}", hint=hint)
            revision = read_revision(rows, RevisionName(adapter.name.tenant, adapter.name.adapter, digest))
            is_live = reference.digest is None and reference.alias == LIVE
            return adapter, revision, self._releases.candidate(rows, revision.name) if is_live else None

    def adapters(
        self, tenants: Sequence[str], after: tuple[str, str], limit: int, granted_to: str = ""
    ) -> Generator[Adapter, None, None]:
        """Yield adapters of the tenants, and those granted to one, in order of tenant and name after `after`."""
        values = {f"tenant{place}": tenant for place, tenant in enumerate(tenants)}
        names = ", ".join(f":{name}" for name in values)
        with self._database.reading() as rows:
            selected = rows.execute(
                f"SELECT *, {ALIASES} AS aliases FROM adapters WHERE (tenant IN ({names}) OR (tenant, adapter) IN "
                f"(SELECT tenant, adapter FROM grants WHERE grantee = :granted_to AND {LIVE_GRANT})) "
                "AND (tenant, adapter) > (:after, :after_adapter) ORDER BY tenant, adapter LIMIT :limit",
                {
                    **values,
                    "granted_to": granted_to,
                    "now": time.time_ns(),
                    "after": after[0],
                    "after_adapter": after[1],
                    "limit": limit,
                },
            ).fetchall()
            for row in selected:
                yield with_aliases(row, row["aliases"])

    def revisions(self, name: AdapterName, before: int, limit: int) -> Generator[Revision, None, None]:
        """Yield the adapter's revisions whose `order` is below `before`, newest first. Raises NotFound."""
        with self._database.reading() as rows:
            row = adapter_row(rows, name)
            selected = rows.execute(
                REVISIONS + "WHERE revisions.adapter_id = ? AND number < ? ORDER BY number DESC LIMIT ?",
                (row["id"], before, limit),
            ).fetchall()
            for revision_row in selected:
                yield to_revision(revision_row, rows)

    def find(self, digests: Sequence[str]) -> list[FoundRevision]:
        """Return the revisions of these digests, of all tenants, in order of digest and adapter."""
        with self._database.reading() as rows:
            return find_by_digests(rows, digests)

    def open_revision(self, name: RevisionName) -> tuple[Revision, dict[str, BlobReader]]:
        """Open a revision's files; returns revision and readers of the same moment. Raises NotFound, CorruptBlob.

        The adapter may have been deleted a while ago.
        """
        with self._database.reading() as rows:
            revision = find_revision(rows, name) or self.deleted.find(rows, name)
            if revision is None:
                raise NotFound("revision", str(name))
            return revision, self._data.open(rows, {CONFIG_FILE: revision.config, WEIGHTS_FILE: revision.weights})

    def check_upload(self, name: AdapterName, base_model: str, etag: str, key_id: str) -> None:
        """Check that a revision may be uploaded with an API key.

        Raises Aborted on a stale etag, Mismatch if the base is another, Exhausted where a quota is used up.
        """
        with self._database.reading() as rows:
            row = find_adapter(rows, name)
            _check(rows, row, name, base_model, etag)
            self.quotas.check_room(rows, name.tenant, key_id, new_adapter=row is None, coming=1)

    def publish(self, new: NewRevision, upload: Upload) -> tuple[Adapter, Revision, bool]:
        """Keep an upload as a revision and move its alias; returns True for a new revision.

        Raises as `check_upload` does, Aborted if the base model was replaced meanwhile, Mismatch where an alias needs a
        signature.
        """
        if new.alias is not None:
            self._releases.check_alias(new.revision.name.tenant)
        files = {CONFIG_FILE: new.revision.config, WEIGHTS_FILE: new.revision.weights}
        with self._data.staged(upload, files) as keep:
            return self._publish(new, keep)

    def _publish(self, new: NewRevision, keep: Keep) -> tuple[Adapter, Revision, bool]:
        sent, now = new.revision, time.time_ns()
        name = sent.name.adapter_name
        blobs = {sent.config.digest, sent.weights.digest}
        with self._database.swept(self._data, blobs), self._database.transaction() as rows:
            row = find_adapter(rows, name)
            _check(rows, row, name, sent.base_model, new.etag)
            _check_base(rows, sent)
            new_adapter = row is None
            if row is None:
                rows.execute(
                    "INSERT INTO adapters (tenant, adapter, base_model, create_ns, update_ns, changes) "
                    "VALUES (?, ?, ?, ?, ?, 0)",
                    (name.tenant, name.adapter, sent.base_model, now, now),
                )
                row = adapter_row(rows, name)
            created = _insert_revision(rows, row["id"], new, now)
            if created:
                self.quotas.check_room(rows, name.tenant, new.key_id, new_adapter=new_adapter, coming=0)
            if moved := new.alias is not None:
                moved = self._set_alias(rows, row["id"], new.alias, sent.name.digest, keep=new.keep_alias)
            if created or moved:
                touch(rows, row["id"], now)
            stored = read_revision(rows, sent.name)
            # The config of the same revision may have its keys in another order: the bytes that came first stay.
            if stored.config == sent.config:
                keep(rows, CONFIG_FILE)
            keep(rows, WEIGHTS_FILE)
            return to_adapter(rows, adapter_row(rows, name)), stored, created

    def set_alias(self, name: AdapterName, alias: str, digest: str, etag: str) -> Adapter:
        """Move an alias, or remove it if the digest is empty.

        Raises NotFound, Aborted on a stale etag, Mismatch where the revision needs a signature.
        """
        with self._database.transaction() as rows:
            row = adapter_row(rows, name)
            _check(rows, row, name, row["base_model"], etag)
            if digest:
                revision = read_revision(rows, RevisionName(name.tenant, name.adapter, digest))
                self._releases.check_signed(rows, row["id"], revision.name)
                changed = self._set_alias(rows, row["id"], alias, digest)
            else:
                changed = self._remove_alias(rows, row["id"], alias)
                if not changed:
                    raise NotFound("alias", f"{name}@{alias}")
            if changed:
                touch(rows, row["id"], time.time_ns())
            return to_adapter(rows, adapter_row(rows, name))

    def certify(self, name: RevisionName, statement: Statement[Any]) -> None:
        """Keep a statement about a revision, in the place of an earlier one for the same base and quantization.

        Raises NotFound, Mismatch where the base is not the revision's, InvalidField for one quantization too many.
        """
        kind, base_digest = type(statement.figures), statement.base_digest
        table, values = STATEMENTS[kind], {"create_ns": statement.create_ns, **asdict(statement.figures)}
        with self._database.transaction() as rows:
            revision = read_revision(rows, name)
            if base_digest != revision.base_digest:
                raise Mismatch(
                    str(name),
                    f"measured with base model {base_digest}; the adapter is for {revision.base_digest}",
                    reason="WRONG_BASE",
                )
            about = {"adapter_id": adapter_row(rows, name.adapter_name)["id"], "digest": name.digest}
            about |= {"base_digest": base_digest}
            others = {each.quantization for each in statements_of(rows, about, kind)} - {statement.quantization}
            if len(others) >= _QUANTIZATIONS:
                message = f"the revision has {table} for {_QUANTIZATIONS} others already"
                raise InvalidField(f"{table.removesuffix('s')}.quantization", message)
            columns: dict[str, Any] = {**about, "quantization": statement.quantization, **values}
            rows.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks([*columns])}) "
                "ON CONFLICT (adapter_id, digest, base_digest, quantization) DO UPDATE SET "
                + ", ".join(f"{column} = excluded.{column}" for column in values),
                [int(value) if isinstance(value, bool) else value for value in columns.values()],
            )

    def delete(self, name: AdapterName, etag: str, *, purge: bool = False) -> None:
        """Delete an adapter with its revisions; with `purge` their files too, at once.

        Raises NotFound, Aborted on a stale etag.
        """
        with self._database.transaction() as rows:
            row = adapter_row(rows, name)
            _check(rows, row, name, row["base_model"], etag)
            self.deleted.take(rows, row["id"])
            end_grants(rows, name, time.time_ns())
            rows.execute("DELETE FROM adapters WHERE id = ?", (row["id"],))
        if purge:
            self.deleted.purge(name=name)
            return
        self.free([name.tenant])

    def remove_expired(self) -> int:
        """Delete the revisions whose time has passed; returns how many. Answers that run on them go on."""
        now = time.time_ns()
        with self._database.reading() as rows:
            if rows.execute(_EXPIRED, (now,)).fetchone() is None:
                return 0
        with self._database.transaction() as rows:
            expired = rows.execute(_EXPIRED, (now,)).fetchall()
            for row in expired:
                self.deleted.take(rows, row["adapter_id"], row["digest"])
                rows.execute("DELETE FROM revisions WHERE number = ?", (row["number"],))
                emptied = rows.execute(
                    "DELETE FROM adapters WHERE id = ? AND NOT EXISTS (SELECT 1 FROM revisions WHERE adapter_id = ?)",
                    (row["adapter_id"], row["adapter_id"]),
                )
                if emptied.rowcount:
                    end_grants(rows, AdapterName(row["tenant"], row["adapter"]), now)
                else:
                    touch(rows, row["adapter_id"], now)
        self.free({row["tenant"] for row in expired})
        return len(expired)

    def _set_alias(self, rows: Rows, adapter_id: int, alias: str, digest: str, *, keep: bool = False) -> bool:
        """Point the alias at the digest; returns whether it pointed elsewhere, which is refused with `keep`."""
        aliases = dict(rows.execute("SELECT alias, digest FROM aliases WHERE adapter_id = ?", (adapter_id,)).fetchall())
        if aliases.get(alias) == digest:
            return False
        if keep and alias in aliases:
            raise AlreadyExists(f"alias {alias} means {aliases[alias]} already, not {digest}", reason="ALIAS_KEPT")
        if alias not in aliases and len(aliases) >= _MAX_ALIASES:
            raise InvalidField("alias", f"the adapter has {_MAX_ALIASES} aliases already; remove one first")
        point_alias(rows, adapter_id, alias, digest)
        if alias == LIVE:
            self._releases.live_moved(rows, adapter_id, digest)
        return True

    def _remove_alias(self, rows: Rows, adapter_id: int, alias: str) -> bool:
        """Remove the alias; returns whether there was one."""
        deleted = rows.execute("DELETE FROM aliases WHERE adapter_id = ? AND alias = ?", (adapter_id, alias))
        if alias == LIVE:
            self._releases.live_moved(rows, adapter_id, "")
        return bool(deleted.rowcount)

    def free(self, tenants: Iterable[str]) -> None:
        """Remove files of deleted revisions whose time has passed, or that are beyond their tenant's quota."""
        with suppress(Exhausted):  # their revisions are deleted; their bytes are freed later
            self.deleted.purge()
            for tenant in tenants:
                if (most_bytes := self.quotas.plans.of(tenant).adapter_bytes) is not None:
                    self.deleted.trim(tenant, most_bytes)


def _check(rows: Rows, row: Row | None, name: AdapterName, base_model: str, etag: str) -> None:
    if only_trains():
        lasting = "SELECT 1 FROM revisions WHERE adapter_id = ? AND expire_ns IS NULL"
        shared = row is None and find_adapter(rows, AdapterName(SHARED, name.adapter))
        if shared or (row is not None and rows.execute(lasting, (row["id"],)).fetchone()):
            what = "is a shared adapter's name" if shared else "has revisions without a time to live"
            message = f"{name} {what}: the role trainer changes only what trainers pushed; use another name"
            raise PermissionDenied(message, "NOT_TRAINED")
    if etag and (row is None or etag_of(row) != etag):
        raise Aborted(f"{name} has changed since etag {etag} was read; read it again")
    if row is not None and row["base_model"] != base_model:
        raise Mismatch(
            "base_model", f"{name} belongs to base model {row['base_model']}, not to {base_model}; use another name"
        )


def _check_base(rows: Rows, revision: Revision) -> None:
    selected = rows.execute(
        "SELECT digest, json_extract(manifest, '$.original_digest') AS original FROM base_models WHERE name = ?",
        (revision.base_model,),
    )
    if all((row["original"] or row["digest"]) != revision.base_digest for row in selected):
        raise Aborted(f"base model {revision.base_model} was replaced during the upload; upload again")


def _insert_revision(rows: Rows, adapter_id: int, new: NewRevision, now: int) -> bool:
    """Insert a revision; returns False for bytes that are there, which now count as validated against the new base."""
    revision = new.revision
    origin = revision.provenance

    def note_origin() -> None:
        if origin is not None:  # of bytes that came twice the first origin stays
            values = (adapter_id, revision.name.digest, msgspec.json.encode(replace(origin, fetch_ns=now)).decode())
            rows.execute("INSERT INTO provenance VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values)

    expire_ns = None if new.ttl_s is None else now + round(new.ttl_s * 1e9)
    same = rows.execute(
        # max() is NULL where one of them is: such a revision does not end by itself.
        "UPDATE revisions SET base_digest = ?, rank = ?, expire_ns = max(expire_ns, ?) "
        "WHERE adapter_id = ? AND digest = ?",
        (revision.base_digest, revision.rank, expire_ns, adapter_id, revision.name.digest),
    )
    if same.rowcount:
        note_origin()
        return False
    rows.execute(
        "INSERT INTO revisions (adapter_id, digest, base_digest, rank, config_digest, config_bytes, weights_digest, "
        "weights_bytes, create_ns, expire_ns) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(adapter_id, revision.name.digest, revision.base_digest, revision.rank, revision.config.digest),
            *(revision.config.size, revision.weights.digest, revision.weights.size, now, expire_ns),
        ),
    )
    note_origin()
    if new.key_id:
        rows.execute("INSERT INTO revision_keys VALUES (?, ?, ?)", (adapter_id, revision.name.digest, new.key_id))
    return True


def point_alias(rows: Rows, adapter_id: int, alias: str, digest: str) -> None:
    """Point an alias at a revision."""
    rows.execute(
        "INSERT INTO aliases (adapter_id, alias, digest) VALUES (?, ?, ?) "
        "ON CONFLICT (adapter_id, alias) DO UPDATE SET digest = excluded.digest",
        (adapter_id, alias, digest),
    )


def touch(rows: Rows, adapter_id: int, now: int) -> None:
    """Give an adapter that has changed another etag."""
    rows.execute("UPDATE adapters SET changes = changes + 1, update_ns = ? WHERE id = ?", (now, adapter_id))
