"""A catalog that several stores share, in a bucket: each has a replica in SQLite, and changes go through one object.

    head              the catalog's state: a snapshot, segments of changes after it, and the last changes themselves
    snapshots/ID      the SQLite file after so many changes
    segments/ID       changes, in their order

A change is a transaction's statements with their values. It is run on the replica, then put at the end of `head`, on
the condition that `head` is still the one that the replica has (If-Match); only then it is committed. Where another
store was faster it is rolled back, the other's changes are run, and it is made again: nothing is lost, and every
replica has had the same statements in the same order. So these must be deterministic: times and ids are values.

A bucket without conditional writes is refused at the start.
"""

from __future__ import annotations

import logging
import math
import random
import re
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, NotModifiedError, PreconditionError
from obstore.store import ObjectStore

from loraplex.adapter_store.database import MIGRATIONS, Database, Statement, migrate
from loraplex.adapter_store.storage import DataDirectoryError
from loraplex.runtime.rpc.errors import Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

# Maximum size in bytes of `head`, which is written with every change, and maximum number of segments after a snapshot.
_HEAD_BYTES, _SEGMENTS = 64 << 10, 64
# Time in seconds for which a change is tried again while other stores are faster.
CONTENDED_S = 20.0
_HEAD = "head"


class Conflict(Unavailable):
    """Another store has changed the catalog meanwhile: the change was not made, and can be made again."""

    reason = "STORE_CONTENDED"


class _Change(msgspec.Struct, frozen=True, array_like=True):
    change_id: str
    statements: list[Statement]


class _Segment(msgspec.Struct, frozen=True, array_like=True):
    """Changes in an object of their own; `count` is the number of all changes up to its end."""

    key: str
    count: int


class _Head(msgspec.Struct, frozen=True):
    """The state: a snapshot of the catalog after `snapshot_count` changes, and all later ones, `count` in all."""

    schema: int
    count: int
    snapshot: str
    snapshot_count: int
    segments: tuple[_Segment, ...] = ()
    tail: tuple[_Change, ...] = ()


# The head of a replica that has nothing yet.
_NONE = _Head(0, -1, "", -1)


class Replica(Database):
    """The replica of one store, in a file that is begun anew with each start."""

    def __init__(self, path: Path, bucket: ObjectStore) -> None:
        self._bucket = bucket
        self._directory = path.parent
        self._head, self._version = _NONE, _version_of({})
        self._current_at = -math.inf
        for ending in ("", "-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        super().__init__(path)
        try:
            self._connection.execute("PRAGMA synchronous = OFF")  # the bucket has it
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Read the catalog, or make it. Raises DataDirectoryError."""
        try:
            self._check_conditional_writes()
            head = self._read_head()
            if head is None:
                key = self._put_snapshot()
                with suppress(AlreadyExistsError, PreconditionError):
                    first = _Head(len(MIGRATIONS), 0, key, 0)
                    obstore.put(self._bucket, _HEAD, msgspec.msgpack.encode(first), mode="create", use_multipart=False)
                head = self._read_head()
            if head is None:
                raise DataDirectoryError("--bucket: the catalog that was written cannot be read")
            began = time.monotonic()
            self._follow(*head)
            self._current_at = began
            if head[0].schema < len(MIGRATIONS):
                log.info(
                    "the catalog in the bucket is of version %d: writing version %d", head[0].schema, len(MIGRATIONS)
                )
                self.repeated(self.compact)
        except (BaseError, msgspec.MsgspecError) as error:
            raise DataDirectoryError(f"--bucket: the catalog cannot be read: {_line(error)}") from error

    def _check_conditional_writes(self) -> None:
        """Refuse a bucket that writes regardless of conditions: two stores would overwrite each other's changes."""
        key = f"probes/{uuid.uuid4().hex}"
        try:
            first = obstore.put(self._bucket, key, b"1", mode="create", use_multipart=False)
            kept = True
            for mode in ("create", {"e_tag": f'"{"0" * 32}"'}):
                with suppress(AlreadyExistsError, PreconditionError, NotFoundError):
                    obstore.put(self._bucket, key, b"2", mode=mode, use_multipart=False)  # type: ignore[arg-type]
                    kept = False
            obstore.put(self._bucket, key, b"3", mode=_version_of(first), use_multipart=False)
        except PreconditionError:
            kept = False
        finally:
            with suppress(BaseError):
                obstore.delete(self._bucket, key)
        if not kept:
            raise DataDirectoryError(
                "--bucket: it has no conditional writes (If-None-Match, If-Match); use another one"
            )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: all of it happens or nothing, and it is in the bucket when it ends.

        Raises Conflict where another store was faster, Unavailable where the bucket does not answer: it may have
        happened then.
        """
        with self.lock:
            appended = False
            try:
                with super().transaction() as rows:
                    before, self._connection.noted = rows.total_changes, []
                    yield rows
                    noted, self._connection.noted = self._connection.noted, None
                    if rows.total_changes != before:
                        self._append([each for each in noted if _writes(each[0])])
                        appended = True
            except Conflict:
                self.refresh()
                raise
            except BaseException:
                if appended:  # the bucket has what the replica has not: it begins again with the snapshot
                    self._head, self._version = _NONE, _version_of({})
                raise
            finally:
                self._connection.noted = None

    def repeated(self, change: Callable[[], T]) -> T:
        """Make a change, again while other stores are faster. Raises Conflict after a while."""
        ends = time.monotonic() + CONTENDED_S
        while True:
            try:
                return change()
            except Conflict:
                if time.monotonic() > ends:
                    raise
                time.sleep(random.uniform(0, 0.02))

    def refresh(self) -> bool:
        """Run what other stores have changed; returns whether there was something. Raises Unavailable."""
        began = time.monotonic()
        with _bucket_errors():
            head = self._read_head(self._version.get("e_tag"))
            if is_news := head is not None:
                with self.lock:
                    if is_news := head[0].count >= self._head.count:  # else the store itself was faster
                        self._follow(*head)
        self._current_at = began
        return is_news

    def age_s(self) -> float:
        """Return the time in seconds since the bucket last said that the replica has all changes."""
        return time.monotonic() - self._current_at

    def forget_removed(self) -> None:
        """Write a snapshot without the removed rows, and remove the changes that still have them."""
        super().forget_removed()
        self.repeated(self.compact)

    def compact(self) -> None:
        """Write a snapshot in place of the changes since the last one. Raises Conflict, Unavailable."""
        with self.lock, _bucket_errors():
            former, key = self._head, self._put_snapshot()
            try:
                self._put_head(_Head(len(MIGRATIONS), former.count, key, former.count), "")
            except Conflict:
                obstore.delete(self._bucket, key)
                self.refresh()
                raise
            with suppress(BaseError):  # what stays takes room, and nothing else
                obstore.delete(self._bucket, [former.snapshot, *(each.key for each in former.segments)])

    def _append(self, statements: list[Statement]) -> None:
        """Put a change at the end. Raises Conflict, Unavailable."""
        change = _Change(uuid.uuid4().hex, statements)
        head, tail = self._head, (*self._head.tail, change)
        new = msgspec.structs.replace(head, count=head.count + 1, tail=tail)
        with _bucket_errors():
            if len(msgspec.msgpack.encode(new)) > _HEAD_BYTES:
                segment = _Segment(f"segments/{change.change_id}", new.count)
                obstore.put(self._bucket, segment.key, msgspec.msgpack.encode(tail))
                new = msgspec.structs.replace(new, segments=(*head.segments, segment), tail=())
            self._put_head(new, change.change_id)

    def _put_head(self, new: _Head, change_id: str) -> None:
        """Replace the head that the replica has. Raises Conflict where it is another by now."""
        data = msgspec.msgpack.encode(new)
        try:
            answer = obstore.put(self._bucket, _HEAD, data, mode=self._version, use_multipart=False)
            self._head, self._version = new, _version_of(answer)
        except BaseError as error:
            # The head may have this change already: the library repeated the request, or only its answer was lost.
            current = self._read_head()
            if current is not None and self._is_own(current[0], new, change_id):
                self._head, self._version = new, current[1]
                return
            if isinstance(error, (PreconditionError, AlreadyExistsError)):
                raise Conflict("another store has changed the catalog meanwhile; the same call works again") from error
            raise

    def _is_own(self, current: _Head, new: _Head, change_id: str) -> bool:
        if not change_id:
            return current.snapshot == new.snapshot
        later = self._changes_after(current, new.count - 1)
        return bool(later) and later[0].change_id == change_id

    def _read_head(self, unless: str | None = None) -> tuple[_Head, Any] | None:
        """Return the head and its version; None where there is none, or it is the one of the ETag `unless`."""
        try:
            answer = obstore.get(self._bucket, _HEAD, options={"if_none_match": unless} if unless else None)
        except NotModifiedError:
            return None
        except (NotFoundError, FileNotFoundError) as error:
            if unless:
                raise Unavailable("the bucket has lost the catalog", reason="BUCKET_DOWN") from error
            return None
        head = msgspec.msgpack.decode(bytes(answer.bytes()), type=_Head)
        if head.schema > len(MIGRATIONS):
            raise DataDirectoryError("--bucket: the catalog was written by a later version of the store")
        return head, _version_of(answer.meta)

    def _follow(self, head: _Head, version: Any) -> None:
        """Run the changes that the replica has not, up to a head."""
        while True:
            try:
                if self._head.count < head.snapshot_count:
                    self._load_snapshot(head, version)
                changes = self._changes_after(head, self._head.count)
                break
            except (NotFoundError, FileNotFoundError) as error:  # written anew meanwhile
                current = self._read_head()
                if current is None or current[0] == head:
                    raise Unavailable("the catalog in the bucket lacks a part", reason="BUCKET_DOWN") from error
                head, version = current
        if changes:
            with super().transaction() as rows:
                for change in changes:
                    for sql, values in change.statements:
                        for each in values:
                            rows.execute(sql, each)
        self._head, self._version = head, version
        if changes:
            self.changed([statement for change in changes for statement in change.statements])

    def _changes_after(self, head: _Head, count: int) -> list[_Change]:
        """Return the changes of a head after the first `count`, which its snapshot must not be beyond."""
        changes: list[_Change] = []
        for segment in head.segments:
            if segment.count > count:
                data = bytes(obstore.get(self._bucket, segment.key).bytes())
                content = msgspec.msgpack.decode(data, type=list[_Change])
                changes += content[max(0, len(content) - (segment.count - count)) :]
        begins = head.count - len(head.tail)
        return changes + list(head.tail[max(0, count - begins) :])

    def _load_snapshot(self, head: _Head, version: Any) -> None:
        """Make the replica that of a snapshot. Raises NotFoundError."""
        answer = obstore.get(self._bucket, head.snapshot)
        with tempfile.NamedTemporaryFile(dir=self._directory) as file:
            for piece in answer.stream():
                file.write(piece)
            file.flush()
            self.adapter_changes.unwatch(self._connection)
            with closing(sqlite3.connect(file.name)) as snapshot:
                snapshot.backup(self._connection)
        migrate(self._connection, self._directory)
        self.adapter_changes.watch(self._connection)
        self.adapter_changes.begin_epoch()
        self._head = msgspec.structs.replace(head, count=head.snapshot_count, segments=(), tail=())
        self._version = version
        self.changed(None)

    def _put_snapshot(self) -> str:
        key = f"snapshots/{uuid.uuid4().hex}"
        with tempfile.NamedTemporaryFile(dir=self._directory) as file:
            with closing(sqlite3.connect(file.name)) as snapshot:
                self._connection.backup(snapshot)
            obstore.put(self._bucket, key, Path(file.name))
        return key

    def tidy(self) -> None:
        """Write a snapshot where many changes came since the last one."""
        if len(self._head.segments) > _SEGMENTS:
            self.repeated(self.compact)


@contextmanager
def _bucket_errors() -> Iterator[None]:
    try:
        yield
    except (BaseError, msgspec.MsgspecError, DataDirectoryError) as error:
        message = f"the bucket of the store does not answer: {_line(error)}"
        raise Unavailable(message, reason="BUCKET_DOWN") from error


def _writes(sql: str) -> bool:
    return sql.lstrip()[:6].upper() in {"INSERT", "UPDATE", "DELETE"}


def _version_of(answer: Any) -> Any:
    return {name: answer[name] for name in ("e_tag", "version") if answer.get(name) is not None}


def _line(error: Exception) -> str:
    # Without the time that it took, which would make each of many the same error another one in the log.
    return re.sub(r" in [0-9.]+m?s\b", "", str(error).partition("\n")[0])[:300]
