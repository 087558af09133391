"""Purges of tenants and revocations of API keys, noted outside of the catalog: a restored one has nothing back of them.

    catalog: removals (id, kind, name or digest, noted) ──each second──▶ files in a directory or bucket, as the backups
    a catalog that starts without the row of a file: an older copy ──▶ the file's removal is done again

Its calls block: make them in a thread.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Rows
from loraplex.adapter_store.storage import DataDirectoryError, sync_directory
from loraplex.runtime.telemetry.logging import LogOnce

if TYPE_CHECKING:
    from loraplex.adapter_store.bucket import BucketNotes

log = logging.getLogger(__name__)

# Kinds of removals.
KEY, TENANT = "key", "tenant"
# Timeout in seconds of a request for a file, which is small.
_FILE_S = 10.0


class _Removal(msgspec.Struct):
    kind: Literal["key", "tenant"]
    name: str


def record(rows: Rows, kind: str, name: str) -> None:
    """Record a removal in its transaction."""
    removal_id = f"{kind}-{name if kind == KEY else uuid.uuid4().hex}"  # a tenant's name may be used again
    rows.execute("INSERT INTO removals VALUES (?, ?, ?, 0) ON CONFLICT DO NOTHING", (removal_id, kind, name))


class _Notes:
    """Small files in a directory, made if missing. Raises OSError, as bucket.BucketNotes does."""

    def __init__(self, place: str) -> None:
        self._path = Path(place)
        self._path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        """Keep a file, on the disk."""
        with (self._path / f".{name}").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(self._path / name)
        sync_directory(self._path)

    def names(self) -> list[str]:
        """Return the names of all files."""
        return [path.name for path in self._path.iterdir() if not path.name.startswith(".")]

    def get(self, name: str) -> bytes:
        """Return a file."""
        return (self._path / name).read_bytes()


def _open(place: str) -> _Notes | BucketNotes:
    if "://" not in place:
        return _Notes(place)
    from loraplex.adapter_store.bucket import BucketNotes, open_bucket  # which is slow to import

    return BucketNotes(open_bucket(place, _FILE_S))


class Removals:
    """The files of removals in a place: a directory, made if missing, or the URL of a bucket's folder.

    Raises DataDirectoryError for a place that cannot be opened.
    """

    def __init__(self, database: Database, place: str) -> None:
        self._database, self._place = database, place
        self._kept = LogOnce(log)
        try:
            self._files = _open(place)
        except OSError as error:
            raise DataDirectoryError(f"--removals: {place}: {error.strerror}") from error

    def note(self) -> None:
        """Write the files of removals that have none yet; those that a place does not take are tried again."""
        with self._database.reading() as rows:
            waiting = rows.execute("SELECT id, kind, name FROM removals WHERE noted = 0").fetchall()
        try:
            for removal_id, kind, name in map(tuple, waiting):
                self._files.put(removal_id, msgspec.json.encode(_Removal(kind, name)))
                with self._database.transaction() as rows:
                    rows.execute("UPDATE removals SET noted = 1 WHERE id = ?", (removal_id,))
        except OSError as error:
            self._kept(f"{self._place} does not take notes of removals: {error}")
        else:
            self._kept.reset()

    def apply(self, removers: Mapping[str, Callable[[str], object]]) -> int:
        """Do again what the catalog, a copy of before, does not know to be removed; returns how many.

        `removers` remove the named by kind, also what is not there. Raises DataDirectoryError.
        """
        with self._database.reading() as rows:
            known = {removal_id for (removal_id,) in map(tuple, rows.execute("SELECT id FROM removals").fetchall())}
        try:
            removals = {
                removal_id: msgspec.json.decode(self._files.get(removal_id), type=_Removal)
                for removal_id in self._files.names()
                if removal_id not in known
            }
        except (OSError, msgspec.MsgspecError) as error:
            raise DataDirectoryError(f"--removals: {self._place}: {str(error).partition(chr(10))[0]}") from error
        for removal_id, removal in removals.items():
            removers[removal.kind](removal.name)
            with self._database.transaction() as rows:
                rows.execute(
                    "INSERT INTO removals VALUES (?, ?, ?, 1) ON CONFLICT DO NOTHING",
                    (removal_id, removal.kind, removal.name),
                )
        return len(removals)
