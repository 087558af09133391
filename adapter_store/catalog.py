"""Adapters, their revisions, aliases, certificates and grants, and the revisions of deleted adapters.

Every change is one transaction; blobs come before it, and go after it. Blocks: call it in a thread. Tenants are the
caller's to check: the catalog knows only names. A grant ends with its time, its deletion or the adapter.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import grpc
from loraplex.admin.v1 import grants_pb2 as pb
from loraplex.admin.v1 import grants_pb2_grpc

from adapter_store.convert import list_page, own_adapter, refusals, seconds_of, timestamp
from adapter_store.database import Database
from adapter_store.plans import StoreQuotas
from adapter_store.records import (
    ALIASES,
    REVISIONS,
    Adapter,
    Candidate,
    FitnessCertificate,
    FoundRevision,
    NewRevision,
    Revision,
    adapter_row,
    certificates_of,
    etag_of,
    find_adapter,
    find_by_digests,
    find_revision,
    read_revision,
    to_adapter,
    to_revision,
    with_aliases,
)
from adapter_store.releases import find_candidate, is_signed, live_moved
from adapter_store.signers import Signers
from adapter_store.storage import BlobReader, DataDirectory, Keep, Upload
from artifacts.names import LIVE, SHARED, AdapterName, Reference, RevisionName, check_tenant
from artifacts.peft_config import CONFIG_FILE
from artifacts.revision import WEIGHTS_FILE, Figures
from rpc.errors import Aborted, Exhausted, InvalidField, Mismatch, NotFound
from rpc.principal import caller, calling_tenant

# Maximum number of grants that a tenant has made, ended ones included, which are kept for answers that run.
GRANTS_LIMIT = 10_000
# A grant that has not ended at the time :now.
LIVE_GRANT = "coalesce(end_ns, :now + 1) > :now AND coalesce(expire_ns, :now + 1) > :now"
log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant to `tenant`. Times are nanoseconds since 1970; None: no end yet."""

    adapter: AdapterName
    tenant: str
    create_ns: int
    expire_ns: int | None


class Grants:
    """The grants of all adapters. Its calls block, except `may_use`: make them in a thread.

    Jobs that run go on for `keep_s` after a grant's end, as after a deletion.
    """

    def __init__(
        self, database: Database, keep_s: float, *, clock: Callable[[], int] = time.time_ns, limit: int = GRANTS_LIMIT
    ) -> None:
        self._database = database
        self._keep_ns = round(keep_s * 1e9)
        self._clock = clock
        self._limit = limit

    async def may_use(self, name: AdapterName, tenant: str, *, running: bool = False) -> bool:
        """Return whether the tenant may use the adapter; with `running`, whether a job that runs on it may go on."""
        return name.tenant in {tenant, SHARED} or await asyncio.to_thread(self._is_granted, name, tenant, running)

    def _is_granted(self, name: AdapterName, tenant: str, running: bool) -> bool:
        now = self._clock() - (self._keep_ns if running else 0)
        with self._database.reading() as rows:
            selected = rows.execute(
                "SELECT 1 FROM grants WHERE tenant = :owner AND adapter = :adapter AND grantee = :tenant "
                f"AND {LIVE_GRANT}",
                {"owner": name.tenant, "adapter": name.adapter, "tenant": tenant, "now": now},
            )
            return selected.fetchone() is not None

    def create(self, name: AdapterName, tenant: str, ttl_s: float | None) -> Grant:
        """Grant the use of an adapter, in the place of an earlier grant to the tenant. Raises NotFound or Exhausted."""
        now = self._clock()
        expire_ns = None if ttl_s is None else now + round(ttl_s * 1e9)
        with self._database.transaction() as rows:
            adapter_row(rows, name)
            former = {"owner": name.tenant, "adapter": name.adapter, "tenant": tenant, "now": now - self._keep_ns}
            rows.execute(
                "DELETE FROM grants WHERE tenant = :owner "
                f"AND ((adapter = :adapter AND grantee = :tenant) OR NOT ({LIVE_GRANT}))",
                former,
            )
            count = rows.execute("SELECT count(*) FROM grants WHERE tenant = ?", (name.tenant,)).fetchone()[0]
            if count >= self._limit:
                message = f"{name.tenant} has {count} grants: end some, or delete adapters that others may use"
                raise Exhausted(f"tenants/{name.tenant}/grants", message, retry_after_s=None, reason="GRANTS_FULL")
            rows.execute(
                "INSERT INTO grants (tenant, adapter, grantee, create_ns, expire_ns) VALUES (?, ?, ?, ?, ?)",
                (name.tenant, name.adapter, tenant, now, expire_ns),
            )
        return Grant(name, tenant, now, expire_ns)

    def end(self, name: AdapterName, tenant: str) -> None:
        """End a grant. Raises NotFound."""
        now = self._clock()
        values = {"owner": name.tenant, "adapter": name.adapter, "tenant": tenant, "now": now}
        with self._database.transaction() as rows:
            ended = rows.execute(
                "UPDATE grants SET end_ns = :now WHERE tenant = :owner AND adapter = :adapter AND grantee = :tenant "
                f"AND {LIVE_GRANT}",
                values,
            )
            if not ended.rowcount:
                raise NotFound("grant", f"{name} to {tenant}")

    def page(self, name: AdapterName, after: str, limit: int) -> list[Grant]:
        """Return grants that have not ended, in order of tenant, from the first after `after`. Raises NotFound."""
        values = {"owner": name.tenant, "adapter": name.adapter, "after": after, "now": self._clock(), "limit": limit}
        with self._database.reading() as rows:
            adapter_row(rows, name)
            selected = rows.execute(
                "SELECT * FROM grants WHERE tenant = :owner AND adapter = :adapter AND grantee > :after "
                f"AND {LIVE_GRANT} ORDER BY grantee LIMIT :limit",
                values,
            )
            return [Grant(name, row["grantee"], row["create_ns"], row["expire_ns"]) for row in selected]


def end_grants(rows: sqlite3.Connection, name: AdapterName, now: int) -> None:
    """End all grants of an adapter that is being deleted."""
    rows.execute(
        "UPDATE grants SET end_ns = ? WHERE tenant = ? AND adapter = ? AND end_ns IS NULL",
        (now, name.tenant, name.adapter),
    )


class GrantService(grants_pb2_grpc.GrantServiceServicer):
    """Serves loraplex.admin.v1.GrantService."""

    def __init__(self, grants: Grants) -> None:
        self._grants = grants

    async def CreateGrant(self, request: pb.CreateGrantRequest, context: Context) -> pb.CreateGrantResponse:
        """Let a tenant use one of the caller's adapters."""
        name = own_adapter("adapter", request.adapter, calling_tenant())
        with refusals("tenant"):
            tenant = check_tenant(request.tenant)
        if tenant in {name.tenant, SHARED}:
            raise InvalidField("tenant", f"{tenant!r}: grant it to another tenant")
        ttl_s = seconds_of("ttl", request.ttl, least=0.001) if request.HasField("ttl") else None
        grant = await asyncio.to_thread(self._grants.create, name, tenant, ttl_s)
        log.info("%s: granted %s to %s", caller().name, name, tenant)
        return pb.CreateGrantResponse(grant=_to_pb(grant))

    async def ListGrants(self, request: pb.ListGrantsRequest, context: Context) -> pb.ListGrantsResponse:
        """Return a page of an adapter's grants, in order of tenant."""
        name = own_adapter("adapter", request.adapter, calling_tenant())
        fetch = partial(self._grants.page, name)
        grants, token = await list_page(request, fetch, _to_pb, attrgetter("tenant"))
        return pb.ListGrantsResponse(grants=grants, next_page_token=token)

    async def DeleteGrant(self, request: pb.DeleteGrantRequest, context: Context) -> pb.DeleteGrantResponse:
        """End a grant."""
        name = own_adapter("adapter", request.adapter, calling_tenant())
        await asyncio.to_thread(self._grants.end, name, request.tenant)
        log.info("%s: ended the grant of %s to %s", caller().name, name, request.tenant)
        return pb.DeleteGrantResponse()


def _to_pb(grant: Grant) -> pb.Grant:
    return pb.Grant(
        adapter=str(grant.adapter),
        tenant=grant.tenant,
        create_time=timestamp(grant.create_ns),
        expire_time=timestamp(grant.expire_ns),
    )


_COLUMNS = (
    "number, digest, base_digest, rank, config_digest, config_bytes, weights_digest, weights_bytes, "
    "{0}create_ns, tenant, adapter, base_model"
)
# Maximum number of quantizations for which a revision has certificates.
_QUANTIZATIONS = 32
# Maximum number of aliases of an adapter, so that one answer can list them.
_MAX_ALIASES = 100


class DeletedRevisions:
    """The revisions of deleted adapters, whose files can still be downloaded for `keep_s` seconds.

    A name means nothing from the deletion on. But a request keeps the revision that it was resolved to, and another
    worker may have to fetch it when the answer goes on there.
    """

    def __init__(
        self, database: Database, data: DataDirectory, keep_s: float, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self.database = database
        self.data = data
        self._keep_ns = round(keep_s * 1e9)
        self._clock = clock

    def take(self, rows: sqlite3.Connection, adapter_id: int, digest: str = "") -> None:
        """Record revisions of an adapter as deleted, which the caller deletes in the same transaction; or only one."""
        rows.execute(
            f"INSERT OR REPLACE INTO deleted_revisions ({_COLUMNS.format('')}, delete_ns) "
            f"SELECT {_COLUMNS.format('revisions.')}, ? FROM revisions JOIN adapters ON adapters.id = adapter_id "
            "WHERE adapter_id = ? AND ? IN ('', digest)",
            (self._clock(), adapter_id, digest),
        )

    def find(self, rows: sqlite3.Connection, name: RevisionName) -> Revision | None:
        """Return a deleted revision that may still be downloaded."""
        row = rows.execute(
            "SELECT * FROM deleted_revisions WHERE tenant = ? AND adapter = ? AND digest = ? AND delete_ns > ?",
            (name.tenant, name.adapter, name.digest, self._clock() - self._keep_ns),
        ).fetchone()
        return None if row is None else to_revision(row)

    def purge(self, *, everything: bool = False, name: AdapterName | None = None) -> int:
        """Remove the revisions whose time has passed, or all of them, or all of an adapter; returns how many."""
        until = self._clock() if everything else self._clock() - self._keep_ns
        where, values = "delete_ns <= ?", list[int | str]([until])
        if name is not None:
            where, values = "tenant = ? AND adapter = ?", [name.tenant, name.adapter]
        return self._remove(where, values)

    def trim(self, tenant: str, most_bytes: int) -> int:
        """Remove a tenant's revisions beyond so many bytes, those deleted first; returns how many."""
        upto = "sum(config_bytes + weights_bytes) OVER (ORDER BY delete_ns DESC, rowid DESC)"
        latest = f"SELECT rowid, {upto} AS upto FROM deleted_revisions WHERE tenant = ?"
        return self._remove(f"rowid IN (SELECT rowid FROM ({latest}) WHERE upto > ?)", [tenant, most_bytes])

    def _remove(self, where: str, values: Sequence[int | str]) -> int:
        return self.database.repeated(lambda: self._remove_once(where, values))

    def _remove_once(self, where: str, values: Sequence[int | str]) -> int:
        digests: set[str] = set()
        with self.database.swept(self.data, digests), self.database.transaction() as rows:
            removed = rows.execute(
                f"SELECT config_digest, weights_digest FROM deleted_revisions WHERE {where}", values
            ).fetchall()
            rows.execute(f"DELETE FROM deleted_revisions WHERE {where}", values)
            digests.update(digest for revision in removed for digest in revision)
        return len(removed)


class Catalog:
    """Adapters of all tenants, with what belongs to each."""

    def __init__(
        self,
        database: Database,
        data: DataDirectory,
        deleted: DeletedRevisions,
        quotas: StoreQuotas,
        signers: Signers,
    ) -> None:
        self._database = database
        self._data = data
        self.deleted = deleted
        self._quotas = quotas
        self._signers = signers

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
            return adapter, revision, find_candidate(rows, revision.name) if is_live else None

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
                yield to_revision(revision_row, certificates_of(rows, revision_row))

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
            _check(row, name, base_model, etag)
            self._quotas.check_upload(rows, name.tenant, key_id, new_adapter=row is None)

    def publish(self, new: NewRevision, upload: Upload) -> tuple[Adapter, Revision, bool]:
        """Keep an upload as a revision and move its alias; returns True for a new revision.

        Raises as `check_upload` does, Aborted if the base model was replaced meanwhile, Mismatch where an alias needs a
        signature.
        """
        if new.alias is not None:
            self._signers.check_alias(new.revision.name.tenant)
        files = {CONFIG_FILE: new.revision.config, WEIGHTS_FILE: new.revision.weights}
        with self._data.staged(upload, files) as keep:
            return self._database.repeated(lambda: self._publish(new, keep))

    def _publish(self, new: NewRevision, keep: Keep) -> tuple[Adapter, Revision, bool]:
        sent, now = new.revision, time.time_ns()
        name = sent.name.adapter_name
        blobs = {sent.config.digest, sent.weights.digest}
        with self._database.swept(self._data, blobs), self._database.transaction() as rows:
            row = find_adapter(rows, name)
            _check(row, name, sent.base_model, new.etag)
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
                self._quotas.check_stored(rows, name.tenant, new.key_id, new_adapter=new_adapter)
            moved = new.alias is not None and _set_alias(rows, row["id"], new.alias, sent.name.digest)
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
            _check(row, name, row["base_model"], etag)
            if digest:
                revision = read_revision(rows, RevisionName(name.tenant, name.adapter, digest))
                if self._signers.require(name.tenant) and not is_signed(rows, row["id"], digest):
                    message = "needs a signature before an alias; make a signed release of it"
                    raise Mismatch(str(revision.name), message, reason="SIGNATURE_MISSING")
                changed = _set_alias(rows, row["id"], alias, digest)
            else:
                changed = _remove_alias(rows, row["id"], alias)
                if not changed:
                    raise NotFound("alias", f"{name}@{alias}")
            if changed:
                touch(rows, row["id"], time.time_ns())
            return to_adapter(rows, adapter_row(rows, name))

    def certify(self, name: RevisionName, quantization: str, base_digest: str, figures: Figures) -> FitnessCertificate:
        """Keep a revision's certificate, in the place of an earlier one for the same base and quantization.

        Raises NotFound, Mismatch where the base is not the revision's, InvalidField for one quantization too many.
        """
        certificate = FitnessCertificate(quantization, base_digest, figures, time.time_ns())
        with self._database.transaction() as rows:
            revision = read_revision(rows, name)
            if base_digest != revision.base_digest:
                raise Mismatch(
                    str(name),
                    f"measured with base model {base_digest}, not with {revision.base_digest}, which it is for",
                    reason="WRONG_BASE",
                )
            others = {each.quantization for each in revision.certificates} - {quantization}
            if len(others) >= _QUANTIZATIONS:
                raise InvalidField(
                    "certificate.quantization", f"the revision has certificates for {_QUANTIZATIONS} others already"
                )
            rows.execute(
                "INSERT OR REPLACE INTO certificates (adapter_id, digest, base_digest, quantization, create_ns, "
                "prompts, drawn, tokens, agreement, mean_kl, max_kl) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(adapter_row(rows, name.adapter_name)["id"], name.digest, base_digest, quantization),
                    *(certificate.create_ns, *astuple(figures)),
                ),
            )
        return certificate

    def delete(self, name: AdapterName, etag: str, *, purge: bool = False) -> None:
        """Delete an adapter with its revisions; with `purge` their files too, at once.

        Raises NotFound, Aborted on a stale etag.
        """
        with self._database.transaction() as rows:
            row = adapter_row(rows, name)
            _check(row, name, row["base_model"], etag)
            self.deleted.take(rows, row["id"])
            end_grants(rows, name, time.time_ns())
            rows.execute("DELETE FROM adapters WHERE id = ?", (row["id"],))
        if purge:
            self.deleted.purge(name=name)
            return
        self.free([name.tenant])

    def free(self, tenants: Iterable[str]) -> None:
        """Remove files of deleted revisions whose time has passed, or that are beyond their tenant's quota."""
        with suppress(Exhausted):  # their revisions are deleted; their bytes are freed later
            self.deleted.purge()
            for tenant in tenants:
                if (most_bytes := self._quotas.bytes_of(tenant)) is not None:
                    self.deleted.trim(tenant, most_bytes)


def _check(row: sqlite3.Row | None, name: AdapterName, base_model: str, etag: str) -> None:
    if etag and (row is None or etag_of(row) != etag):
        raise Aborted(f"{name} has changed since etag {etag} was read; read it again")
    if row is not None and row["base_model"] != base_model:
        raise Mismatch(
            "base_model", f"{name} belongs to base model {row['base_model']}, not to {base_model}; use another name"
        )


def _check_base(rows: sqlite3.Connection, revision: Revision) -> None:
    selected = rows.execute(
        "SELECT digest, json_extract(manifest, '$.original_digest') AS original FROM base_models WHERE name = ?",
        (revision.base_model,),
    )
    if all((row["original"] or row["digest"]) != revision.base_digest for row in selected):
        raise Aborted(f"base model {revision.base_model} was replaced during the upload; upload again")


def _insert_revision(rows: sqlite3.Connection, adapter_id: int, new: NewRevision, now: int) -> bool:
    """Insert a revision; returns False for bytes that are there, which now count as validated against the new base."""
    revision = new.revision
    origin = revision.provenance

    def note_origin() -> None:
        if origin is not None:  # of bytes that came twice the first origin stays
            values = (adapter_id, revision.name.digest, replace(origin, fetch_ns=now).to_json())
            rows.execute("INSERT OR IGNORE INTO provenance VALUES (?, ?, ?)", values)

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


def touch(rows: sqlite3.Connection, adapter_id: int, now: int) -> None:
    """Give an adapter that has changed another etag."""
    rows.execute("UPDATE adapters SET changes = changes + 1, update_ns = ? WHERE id = ?", (now, adapter_id))


def _set_alias(rows: sqlite3.Connection, adapter_id: int, alias: str, digest: str) -> bool:
    """Point the alias at the digest; returns whether it pointed elsewhere."""
    aliases = dict(rows.execute("SELECT alias, digest FROM aliases WHERE adapter_id = ?", (adapter_id,)).fetchall())
    if aliases.get(alias) == digest:
        return False
    if alias not in aliases and len(aliases) >= _MAX_ALIASES:
        raise InvalidField("alias", f"the adapter has {_MAX_ALIASES} aliases already; remove one first")
    rows.execute(
        "INSERT OR REPLACE INTO aliases (adapter_id, alias, digest) VALUES (?, ?, ?)", (adapter_id, alias, digest)
    )
    if alias == LIVE:
        live_moved(rows, adapter_id, digest)
    return True


def _remove_alias(rows: sqlite3.Connection, adapter_id: int, alias: str) -> bool:
    """Remove the alias; returns whether there was one."""
    deleted = rows.execute("DELETE FROM aliases WHERE adapter_id = ? AND alias = ?", (adapter_id, alias))
    if alias == LIVE:
        live_moved(rows, adapter_id, "")
    return deleted.rowcount > 0
