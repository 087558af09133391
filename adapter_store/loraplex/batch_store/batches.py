"""Batches as the store keeps them: their states, leases of runners, results of lines, and the files at the end.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
      │ │  │            │             └──▶ expired: its window ended first
      │ │  └────────────┴──▶ cancelling ─▶ cancelled
      │ └──▶ expired
      └──▶ failed, as any that is tried too often

A runner has a batch for LEASE_S after each of its reports. Each lease has a number, and only the last one's holder may
report: one that stood still writes nothing over its successor's work. A line's first result is the one that stays.
A lease is an attempt, until the batch makes progress; after some it is a suspect. A suspect's lease begins with a trial
of TRIAL_S without other suspects, so that one that ends its runner does not count as an attempt of others.
Its calls block: make them in a thread.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Row, Rows, marks
from loraplex.adapter_store.storage import DataDirectory
from loraplex.batch_store.files import (
    INPUT,
    OUTPUT,
    TENANT_BYTES,
    BatchFile,
    add_file,
    check_room,
    new_file,
    number_of,
    read_file,
    used_bytes,
)
from loraplex.runtime.rpc.errors import Aborted, Exhausted, InvalidField, Mismatch, NotFound

# Time in seconds for which a runner has a batch after a report, and after that of its end: the store writes its files.
LEASE_S, FINISH_S = 5.0, 600.0
# Maximum number of a tenant's batches that have not ended, of lines of a batch, and of errors that are kept of a file.
OPEN_BATCHES, LINES, ERRORS = 100, 50_000, 100
# Number of a tenant's newest batches that are kept; of older ones the files are.
KEPT = 10_000
# Number of events that are kept for webhooks.
_EVENTS = 100_000
# Maximum number of attempts without progress, and that of a batch that is no suspect; time in seconds of a trial, in
# which most that end their runners have done so, while lines of others may wait for hours.
ATTEMPTS, _UNSUSPECTED, TRIAL_S = 10, 3, 60.0
# Time in seconds before the attempt after a fault, which doubles with each of them, and for which a caller whose batch
# has given its place back to others waits for its quota.
FAULT_S, QUOTA_S = 10.0, 60.0
# Maximum number of results that are written at a time, and of batches, which have up to 5,000 models, that are read.
_WRITTEN, _READ = 500, 20


class BatchState(StrEnum):
    """The states of a batch, with OpenAI's names."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_NEXT: Mapping[BatchState, frozenset[BatchState]] = {
    BatchState.VALIDATING: frozenset(
        {BatchState.FAILED, BatchState.IN_PROGRESS, BatchState.CANCELLING, BatchState.EXPIRED}
    ),
    BatchState.IN_PROGRESS: frozenset({BatchState.FINALIZING, BatchState.CANCELLING, BatchState.FAILED}),
    BatchState.FINALIZING: frozenset({BatchState.COMPLETED, BatchState.EXPIRED, BatchState.FAILED}),
    BatchState.CANCELLING: frozenset({BatchState.CANCELLED, BatchState.FAILED}),
}
_OPEN = frozenset(_NEXT)


class LineError(msgspec.Struct, frozen=True):
    """An error of a line, numbered from 1; line 0 stands for the whole batch."""

    code: str
    message: str
    line: int = 0
    param: str = ""


class BatchRecord(msgspec.Struct):
    """The stored record of a batch; `times` are when it came into each state, in ns since 1970."""

    endpoint: str
    window_s: float
    metadata: dict[str, str]
    state: BatchState
    times: dict[str, int]
    total: int = 0
    completed: int = 0
    failed: int = 0
    # Number of lines that may have begun, in the order in which runners begin them.
    begun: int = 0
    # Names that requests run with, by those of the lines.
    models: dict[str, str] = {}
    errors: list[LineError] = []
    # Whether its window ended before all lines had begun.
    is_late: bool = False
    # Why its last run failed.
    fault: str = ""
    output_file: str = ""
    error_file: str = ""

    @property
    def expire_ns(self) -> int:
        """Return the time of the window's end."""
        return self.times[BatchState.VALIDATING] + round(self.window_s * 1e9)

    def move(self, state: BatchState) -> None:
        """Come into another state. Raises Mismatch where there is no way to it."""
        if state not in _NEXT.get(self.state, ()):
            raise Mismatch("batch", f"is {self.state.value}, not on its way to {state.value}", reason="BATCH_STATE")
        self.state, self.times[state.value] = state, time.time_ns()


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch of a tenant; `number` grows with every batch of the store."""

    batch: str
    tenant: str
    key_id: str
    input_file: str
    record: BatchRecord
    number: int = 0
    lease: int = 0
    attempts: int = 0

    @property
    def failure(self) -> str:
        """Return why it is not tried again; empty for one that is."""
        if self.attempts <= ATTEMPTS:
            return ""
        why = f", the last by {self.record.fault}" if self.record.fault else ": their runners ended"
        return f"{ATTEMPTS} attempts, one after the other and without a further result, have failed{why}"


@dataclass(frozen=True, slots=True)
class LineResult:
    """The end of a line: the line of the file that it goes into, as JSON."""

    line: int
    failed: bool
    result: str


@dataclass(frozen=True, slots=True)
class Report:
    """A runner's report on its batch; see ReportBatch in batches.proto."""

    total: int = 0
    models: Mapping[str, str] | None = None
    errors: Sequence[LineError] = ()
    begun: int = 0
    results: Sequence[LineResult] = ()
    finished: bool = False
    expired: bool = False
    released: bool = False
    waits: bool = False
    fault: str = ""


class Batches:
    """The batches of a store."""

    def __init__(self, database: Database, data: DataDirectory) -> None:
        self._database, self._data = database, data

    def create(
        self, tenant: str, key_id: str, input_file: str, endpoint: str, window_s: float, metadata: Mapping[str, str]
    ) -> StoredBatch:
        """Make a batch of a file. Raises NotFound, InvalidField, and Exhausted where the tenant has too many."""
        batch = f"batch_{secrets.token_hex(12)}"
        state = BatchState.VALIDATING
        record = BatchRecord(endpoint, window_s, dict(metadata), state, {state.value: time.time_ns()})
        with self._database.transaction() as rows:
            if read_file(rows, tenant, input_file).purpose != INPUT:
                raise InvalidField("input_file", f"{input_file} has answers of a batch: give a file of requests")
            check_room(rows, tenant)  # for its answers
            query = "SELECT count(*) FROM batches WHERE tenant = ? AND is_open = 1"
            if rows.execute(query, (tenant,)).fetchone()[0] >= OPEN_BATCHES:
                message = f"tenant {tenant} has {OPEN_BATCHES} batches that run, the maximum; wait until one has ended"
                raise Exhausted(f"tenants/{tenant}/batches", message, retry_after_s=60.0, reason="BATCHES_FULL")
            rows.execute(
                "INSERT INTO batches "
                "(batch, tenant, key_id, input_file, is_open, lease, lease_end_ns, expire_ns, record) "
                "VALUES (?, ?, ?, ?, 1, 0, 0, ?, ?)",
                (batch, tenant, key_id, input_file, record.expire_ns, _encode(record)),
            )
            rows.execute(
                "DELETE FROM batches WHERE tenant = :tenant AND is_open = 0 AND number <= "
                "(SELECT number FROM batches WHERE tenant = :tenant ORDER BY number DESC LIMIT 1 OFFSET :kept)",
                {"tenant": tenant, "kept": KEPT},
            )
            return _read(rows, batch, tenant)

    def get(self, tenant: str, batch: str) -> StoredBatch:
        """Return a batch of the tenant. Raises NotFound."""
        with self._database.reading() as rows:
            return _read(rows, batch, tenant)

    def page(self, tenant: str, after: str, size: int) -> Iterator[StoredBatch]:
        """Yield batches of the tenant, newest first, from the one after `after` on, if any."""
        query = "SELECT * FROM batches WHERE tenant = ? AND number < ? ORDER BY number DESC LIMIT ?"
        with self._database.reading() as rows:
            before = number_of(rows, "batches", "batch", tenant, after)
        while size > 0:
            with self._database.reading() as rows:
                found = rows.execute(query, (tenant, before, min(size, _READ))).fetchall()
                batches = [_batch(rows, row) for row in found]
            if not batches:
                return
            yield from batches
            before, size = batches[-1].number, size - len(batches)

    def cancel(self, tenant: str, batch: str) -> StoredBatch:
        """Begin no further lines of a batch. Raises NotFound, and Mismatch for one that has ended."""
        with self._database.transaction() as rows:
            found = _read(rows, batch, tenant)
            if found.record.state is not BatchState.CANCELLING:
                if found.record.state in (BatchState.FINALIZING, *(set(BatchState) - _OPEN)):
                    raise Mismatch(batch, f"is {found.record.state.value}: nothing is left to cancel")
                found.record.move(BatchState.CANCELLING)
                _write(rows, found)
                rows.execute("UPDATE batches SET wait_end_ns = 0 WHERE batch = ?", (batch,))
            return found

    def expire(self) -> list[str]:
        """End batches whose window has ended before their files were checked; return them."""
        query, now = "SELECT * FROM batches WHERE is_open = 1 AND expire_ns <= ?", time.time_ns()
        with self._database.reading() as rows:
            if rows.execute(query, (now,)).fetchone() is None:
                return []
        with self._database.transaction() as rows:
            found = [_batch(rows, row) for row in rows.execute(query, (now,)).fetchall()]
            # A store of an older version leaves the time at batches that it lets begin.
            expired = [batch for batch in found if batch.record.state is BatchState.VALIDATING]
            for batch in expired:
                self._end(rows, batch, BatchState.EXPIRED)
            for batch in found:
                _write(rows, batch)
        return [batch.batch for batch in expired]

    def lease(self, except_tenants: Sequence[str] = ()) -> tuple[StoredBatch, list[int]] | None:
        """Take an open batch that no runner has, the oldest of the tenants of whom runners have the fewest.

        Returns it and its lines that have ended.
        """
        now = time.time_ns()
        excepted = {f"tenant{place}": tenant for place, tenant in enumerate((*except_tenants, ""))}
        values = {"now": now, "unsuspected": _UNSUSPECTED, **excepted}
        held = "SELECT tenant, attempts, trial_end_ns FROM batches WHERE is_open = 1 AND lease_end_ns >= :now"
        on_trial = "SELECT 1 FROM held WHERE attempts > :unsuspected AND trial_end_ns > :now"
        query = (
            f"WITH held AS ({held}), shares AS (SELECT tenant, count(*) AS number FROM held GROUP BY tenant) "
            "SELECT batches.* FROM batches LEFT JOIN shares ON shares.tenant = batches.tenant "
            "WHERE is_open = 1 AND lease_end_ns < :now AND wait_end_ns <= :now "
            f"AND batches.tenant NOT IN ({', '.join(f':{name}' for name in excepted)}) "
            f"AND (attempts < :unsuspected OR NOT EXISTS ({on_trial})) "
            "ORDER BY coalesce(shares.number, 0), attempts > :unsuspected, batches.number LIMIT 1"
        )
        with self._database.reading() as rows:  # runners ask often, and beside other transactions
            if rows.execute(query, values).fetchone() is None:
                return None
        with self._database.transaction() as rows:
            row = rows.execute(query, values).fetchone()
            if row is None:
                return None
            batch = row["batch"]
            rows.execute(
                "UPDATE batches SET lease = lease + 1, attempts = attempts + 1, lease_end_ns = ?, trial_end_ns = ? "
                "WHERE batch = ?",
                (now + _LEASE_NS, now + round(TRIAL_S * 1e9), batch),
            )
            ended = rows.execute("SELECT line FROM batch_results WHERE batch = ?", (batch,)).fetchall()
            found = _read(rows, batch)
            self._look_at_key(rows, found)
            return found, [line for (line,) in map(tuple, ended)]

    def report(self, name: str, lease: int, report: Report) -> StoredBatch:
        """Keep what a runner has done, and its lease.

        Raises Aborted where another runner has the batch or it has ended, NotFound where its tenant was purged.
        """
        with self._database.transaction() as rows:
            found = self._held(rows, name, lease)
            self._look_at_key(rows, found)
            record = found.record
            if begins := report.models is not None and record.state is BatchState.VALIDATING:
                record.total, record.models = report.total, dict(report.models or {})
                record.move(BatchState.IN_PROGRESS)
            record.begun = max(record.begun, report.begun)
            record.is_late |= report.expired
            record.fault = report.fault or record.fault
            progresses = self._add_results(rows, found, report.results) or begins or report.waits or report.released
            _write(rows, found)
            self._set_lease(rows, found, report, 0 if progresses else found.attempts)
            found = _read(rows, name)
        return self._finish(found, report.errors) if report.finished or report.errors else found

    def _add_results(self, rows: Rows, batch: StoredBatch, results: Sequence[LineResult]) -> bool:
        """Keep the first result of each line, and return whether there is a new one.

        Cancels a batch whose tenant has no room for more.
        """
        query = f"SELECT line FROM batch_results WHERE batch = ? AND line IN ({marks(results)})"
        known = {line for (line,) in map(tuple, rows.execute(query, (batch.batch, *(one.line for one in results))))}
        added = {one.line: one for one in reversed(results) if one.line not in known}
        if not added:
            return False
        rows.executemany(
            "INSERT INTO batch_results VALUES (?, ?, ?, ?)",
            [(batch.batch, one.line, int(one.failed), one.result) for one in added.values()],
        )
        size = sum(len(one.result.encode()) for one in added.values())
        rows.execute("UPDATE batches SET result_bytes = result_bytes + ? WHERE batch = ?", (size, batch.batch))
        record = batch.record
        if record.state is BatchState.IN_PROGRESS and (used := used_bytes(rows, batch.tenant)) > TENANT_BYTES:
            why = f"tenant {batch.tenant} has files and results of {used} bytes, more than {TENANT_BYTES}: delete files"
            record.errors = [LineError("storage_full", f"{why}, and give the lines that did not run to a new batch")]
            record.move(BatchState.CANCELLING)
        return True

    def _set_lease(self, rows: Rows, batch: StoredBatch, report: Report, attempts: int) -> None:
        """Keep or end the lease; after a fault the batch waits, after a wait for a quota all of its caller's do."""
        now = time.time_ns()
        least_ns, record = round(FAULT_S * 1e9) if report.fault else 0, batch.record
        # Not for long where the next attempt is to end the batch.
        left_ns = 0 if record.state is BatchState.CANCELLING else record.expire_ns - now
        wait_ns = min(least_ns << max(0, attempts - 1), max(least_ns, left_ns))
        rows.execute(
            "UPDATE batches SET lease_end_ns = ?, wait_end_ns = ?, attempts = ? WHERE batch = ?",
            (0 if report.released or report.fault else now + _LEASE_NS, now + wait_ns, attempts, batch.batch),
        )
        if report.released and report.waits:
            rows.execute(
                "UPDATE batches SET wait_end_ns = max(wait_end_ns, ?) "
                "WHERE tenant = ? AND key_id = ? AND is_open = 1 AND lease_end_ns < ?",
                (now + round(QUOTA_S * 1e9), batch.tenant, batch.key_id, now),
            )

    def _finish(self, batch: StoredBatch, errors: Sequence[LineError]) -> StoredBatch:
        """Write the files of a batch and end it: all of that, or nothing but its state.

        It fails with what results it has where there are errors; else each line has one.
        """
        with self._database.transaction() as rows:
            found = self._held(rows, batch.batch, batch.lease)
            record, end = found.record, BatchState.CANCELLED
            if errors:
                end = BatchState.FAILED
            elif (ended := record.completed + record.failed) != record.total:
                message = f"{ended} of {record.total} lines of {batch.batch} have ended"
                raise InvalidField("finished", message)
            elif record.state is not BatchState.CANCELLING:
                end = BatchState.EXPIRED if record.is_late else BatchState.COMPLETED
                if record.state is BatchState.IN_PROGRESS:
                    record.move(BatchState.FINALIZING)
                    _write(rows, found)
            end_ns = time.time_ns() + round(FINISH_S * 1e9)
            rows.execute("UPDATE batches SET lease_end_ns = ? WHERE batch = ?", (end_ns, batch.batch))
        upload = self._data.new_upload()
        try:
            for name, failed in (("output", 0), ("errors", 1)):
                for piece in self._result_pieces(batch.batch, failed):
                    upload.append(name, piece)
            blobs = upload.finish()
            digests = [blob.digest for blob in blobs.values()]
            with (
                self._data.staged(upload, blobs) as keep,
                self._database.swept(self._data, digests),
                self._database.transaction() as rows,
            ):
                found = self._held(rows, batch.batch, batch.lease)
                for name, blob in blobs.items():
                    file = new_file(found.tenant, OUTPUT, f"{found.batch}_{name}.jsonl", blob)
                    keep(rows, name)
                    add_file(rows, file)
                    self._name_file(found.record, name, file)
                found.record.errors = list(errors)[:ERRORS] or found.record.errors
                self._end(rows, found, end)
                _write(rows, found)
                return _read(rows, batch.batch)
        finally:
            upload.discard()

    def _name_file(self, record: BatchRecord, name: str, file: BatchFile) -> None:
        if name == "output":
            record.output_file = file.file
        else:
            record.error_file = file.file

    def _result_pieces(self, batch: str, failed: int) -> Iterable[bytes]:
        """Yield the lines of a file, in the order of the input's, some at a time: other calls have their turn."""
        after = 0
        while True:
            with self._database.reading() as rows:
                found = rows.execute(
                    "SELECT line, result FROM batch_results WHERE batch = ? AND failed = ? AND line > ? "
                    "ORDER BY line LIMIT ?",
                    (batch, failed, after, _WRITTEN),
                ).fetchall()
            if not found:
                return
            after = found[-1]["line"]
            yield "".join(f"{row['result']}\n" for row in found).encode()

    def _end(self, rows: Rows, batch: StoredBatch, state: BatchState) -> None:
        """End a batch: its results are in its files by now, and webhooks hear of it."""
        batch.record.move(state)
        rows.execute("DELETE FROM batch_results WHERE batch = ?", (batch.batch,))
        event = {
            "type": f"batch.{state.value}",
            "timestamp": datetime.now(UTC).isoformat(),
            "data": {"id": batch.batch, "tenant": batch.tenant},
        }
        rows.execute("INSERT INTO batch_events (tenant, record) VALUES (?, ?)", (batch.tenant, json.dumps(event)))
        rows.execute("DELETE FROM batch_events WHERE event < (SELECT max(event) FROM batch_events) - ?", (_EVENTS,))

    def _held(self, rows: Rows, name: str, lease: int) -> StoredBatch:
        """Return a batch that a runner has. Raises Aborted, NotFound."""
        found = _read(rows, name)
        if found.lease != lease or found.record.state not in _OPEN:
            raise Aborted(f"another runner has {name} by now, or it has ended", reason="LEASE_LOST")
        return found

    def _look_at_key(self, rows: Rows, batch: StoredBatch) -> None:
        """Cancel a batch whose API key is valid no more."""
        record = batch.record
        if not batch.key_id or record.state not in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
            return
        row = rows.execute("SELECT revoke_ns, expire_ns FROM api_keys WHERE key_id = ?", (batch.key_id,)).fetchone()
        if row is not None and row["revoke_ns"] is None and (row["expire_ns"] or _NEVER) > time.time_ns():
            return
        why = f"API key {batch.key_id}, which made the batch, is revoked or has expired: no further line runs"
        record.errors = [LineError("credential_invalid", why)]
        record.move(BatchState.CANCELLING)
        _write(rows, batch)


_LEASE_NS = round(LEASE_S * 1e9)
_NEVER = 2**63


def _encode(record: BatchRecord) -> str:
    return msgspec.json.encode(record).decode()


def _write(rows: Rows, batch: StoredBatch) -> None:
    record = batch.record
    expire_ns = record.expire_ns if record.state is BatchState.VALIDATING else None
    values = (int(record.state in _OPEN), expire_ns, _encode(record), batch.batch)
    rows.execute("UPDATE batches SET is_open = ?, expire_ns = ?, record = ? WHERE batch = ?", values)


def _read(rows: Rows, batch: str, tenant: str = "") -> StoredBatch:
    """Return a batch, of the tenant where one is given. Raises NotFound."""
    query = "SELECT * FROM batches WHERE batch = ? AND ? IN ('', tenant)"
    row = rows.execute(query, (batch, tenant)).fetchone()
    if row is None:
        raise NotFound("batch", batch)
    return _batch(rows, row)


def _batch(rows: Rows, row: Row) -> StoredBatch:
    record = msgspec.json.decode(row["record"], type=BatchRecord)
    if record.state in _OPEN:
        counted = rows.execute(
            "SELECT count(*), coalesce(sum(failed), 0) FROM batch_results WHERE batch = ?", (row["batch"],)
        ).fetchone()
        record.completed, record.failed = int(counted[0]) - int(counted[1]), int(counted[1])
    names = ("batch", "tenant", "key_id", "input_file", "number", "lease", "attempts")
    return StoredBatch(record=record, **{name: row[name] for name in names})
