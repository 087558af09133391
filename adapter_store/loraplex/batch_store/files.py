"""Files of tenants: requests of batches, their answers and their errors. Their bytes are blobs of the store.

Its calls block: make them in a thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Blob, Row, Rows
from loraplex.adapter_store.storage import BlobReader, DataDirectory, Upload
from loraplex.runtime.rpc.errors import Exhausted, InvalidField, Mismatch, NotFound

# Maximum bytes of a file, and maximum number and bytes of a tenant's files: those of OpenAI's, but for the number.
FILE_BYTES = 200 * 1024 * 1024
TENANT_FILES, TENANT_BYTES = 1_000, 100 * 1024**3
# Purposes of files: requests, and what a batch has made of them.
INPUT, OUTPUT = "batch", "batch_output"
_NEWEST = 2**62


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A file of a tenant; `number` grows with every file of the store."""

    file: str
    tenant: str
    purpose: str
    filename: str
    blob: Blob
    create_ns: int
    number: int = 0


class BatchFiles:
    """The files of a store."""

    def __init__(self, database: Database, data: DataDirectory) -> None:
        self._database, self._data = database, data

    def new_upload(self) -> Upload:
        """Return an upload for a file's bytes."""
        return self._data.new_upload()

    def keep(self, tenant: str, filename: str, upload: Upload) -> BatchFile:
        """Keep the bytes of an upload, named `file`, as an input file. Raises Exhausted at the tenant's limits."""
        blob = upload.finish()["file"]
        file = new_file(tenant, INPUT, filename, blob)
        with (
            self._data.staged(upload, {"file": blob}) as keep,
            self._database.swept(self._data, [blob.digest]),
            self._database.transaction() as rows,
        ):
            check_room(rows, tenant, blob.size)
            keep(rows, "file")
            add_file(rows, file)
        return self.get(tenant, file.file)

    def get(self, tenant: str, file: str) -> BatchFile:
        """Return a file of the tenant. Raises NotFound."""
        with self._database.reading() as rows:
            return read_file(rows, tenant, file)

    def page(self, tenant: str, purpose: str, after: str, size: int) -> Sequence[BatchFile]:
        """Return files of the tenant, of a purpose or all, newest first, from the one after `after` on, if any."""
        with self._database.reading() as rows:
            before = number_of(rows, "batch_files", "file", tenant, after)
            found = rows.execute(
                "SELECT * FROM batch_files WHERE tenant = ? AND number < ? AND ? IN ('', purpose) "
                "ORDER BY number DESC LIMIT ?",
                (tenant, before, purpose, size),
            ).fetchall()
        return [_file(row) for row in found]

    def open(self, tenant: str, file: str) -> BlobReader:
        """Open a file for reading. Raises NotFound or CorruptBlob."""
        with self._database.reading() as rows:
            return self._data.open(rows, {"file": read_file(rows, tenant, file).blob})["file"]

    def delete(self, tenant: str, file: str) -> None:
        """Delete a file. Raises NotFound, and Mismatch for the input of a batch that has not ended."""
        digest = self.get(tenant, file).blob.digest
        with self._database.swept(self._data, [digest]), self._database.transaction() as rows:
            read_file(rows, tenant, file)
            running = rows.execute(
                "SELECT batch FROM batches WHERE tenant = ? AND input_file = ? AND is_open = 1", (tenant, file)
            ).fetchone()
            if running is not None:
                raise Mismatch("file", f"{file} is the input of {running['batch']}, which runs; cancel it first")
            rows.execute("DELETE FROM batch_files WHERE file = ?", (file,))


def new_file(tenant: str, purpose: str, filename: str, blob: Blob) -> BatchFile:
    """Return a file with an id of its own, that is not kept yet."""
    return BatchFile(f"file-{secrets.token_hex(12)}", tenant, purpose, filename, blob, time.time_ns())


def used_bytes(rows: Rows, tenant: str) -> int:
    """Return the bytes of a tenant's files, and of results of its open batches, which become files."""
    query = (
        "SELECT (SELECT coalesce(sum(bytes), 0) FROM batch_files WHERE tenant = :tenant) + "
        "(SELECT coalesce(sum(result_bytes), 0) FROM batches WHERE tenant = :tenant AND is_open = 1)"
    )
    return int(rows.execute(query, {"tenant": tenant}).fetchone()[0])


def check_room(rows: Rows, tenant: str, size: int = 0) -> None:
    """Raise Exhausted where a tenant may not have another file of so many bytes."""
    count = rows.execute("SELECT count(*) FROM batch_files WHERE tenant = ?", (tenant,)).fetchone()[0]
    used = used_bytes(rows, tenant)
    if count >= TENANT_FILES or used + size > TENANT_BYTES:
        most = f"at most {TENANT_FILES} files of {TENANT_BYTES} bytes together"
        message = f"tenant {tenant} has {count} files and results of {used} bytes; {most}: delete some"
        raise Exhausted(f"tenants/{tenant}/files", message, retry_after_s=None, reason="FILES_FULL")


def add_file(rows: Rows, file: BatchFile) -> None:
    """Add the row of a file."""
    values: Mapping[str, object] = {
        **{name: getattr(file, name) for name in ("file", "tenant", "purpose", "filename", "create_ns")},
        "digest": file.blob.digest,
        "bytes": file.blob.size,
    }
    rows.execute(
        "INSERT INTO batch_files (file, tenant, purpose, digest, bytes, filename, create_ns) "
        "VALUES (:file, :tenant, :purpose, :digest, :bytes, :filename, :create_ns)",
        values,
    )


def number_of(rows: Rows, table: str, column: str, tenant: str, after: str) -> int:
    """Return the number of a tenant's file or batch; for an empty one that of none. Raises InvalidField."""
    if not after:
        return _NEWEST
    row = rows.execute(f"SELECT number FROM {table} WHERE {column} = ? AND tenant = ?", (after, tenant)).fetchone()
    if row is None:
        raise InvalidField("page_token", f"{after[:80]!r} is not a {column} of this list")
    return int(row["number"])


def read_file(rows: Rows, tenant: str, file: str) -> BatchFile:
    """Return a file of the tenant. Raises NotFound."""
    row = rows.execute("SELECT * FROM batch_files WHERE file = ? AND tenant = ?", (file, tenant)).fetchone()
    if row is None:
        raise NotFound("file", file)
    return _file(row)


def _file(row: Row) -> BatchFile:
    names = ("file", "tenant", "purpose", "filename", "create_ns", "number")
    return BatchFile(blob=Blob(row["digest"], row["bytes"]), **{name: row[name] for name in names})
