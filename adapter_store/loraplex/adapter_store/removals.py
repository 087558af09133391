"""Purges of tenants and revocations of API keys, noted outside of the catalog: a restored one has nothing back of them.

    catalog: removals (id, kind, name or digest, noted) ──each second──▶ files in a directory or bucket, as the backups
    a catalog that starts without the row of a file: an older copy ──▶ the file's removal is done again

Its calls block: make them in a thread.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import obstore
from obstore.exceptions import BaseError

from loraplex.adapter_store.bucket import open_bucket
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Rows
from loraplex.adapter_store.storage import DataDirectoryError

log = logging.getLogger(__name__)

# Kinds of removals.
KEY, TENANT = "key", "tenant"
# Timeout in seconds of a request for a file, which is small.
_FILE_S = 10.0


class _Removal(msgspec.Struct):
    kind: str
    name: str


def record(rows: Rows, kind: str, name: str) -> None:
    """Record a removal in its transaction."""
    removal_id = f"{kind}-{name if kind == KEY else uuid.uuid4().hex}"  # a tenant's name may be used again
    rows.execute("INSERT INTO removals VALUES (?, ?, ?, 0) ON CONFLICT DO NOTHING", (removal_id, kind, name))


class Removals:
    """The files of removals in a place: a directory, made if missing, or the URL of a bucket's folder.

    Raises DataDirectoryError for a place that cannot be opened.
    """

    def __init__(self, database: Database, place: str) -> None:
        self._database, self._place = database, place
        if "://" not in place:
            Path(place).mkdir(parents=True, exist_ok=True)
            place = Path(place).absolute().as_uri()
        self._files = open_bucket(place, _FILE_S)

    def note(self) -> None:
        """Write the files of removals that have none yet; those that a place does not take are tried again."""
        with self._database.reading() as rows:
            waiting = rows.execute("SELECT id, kind, name FROM removals WHERE noted = 0").fetchall()
        try:
            for removal_id, kind, name in map(tuple, waiting):
                obstore.put(self._files, removal_id, msgspec.json.encode(_Removal(kind, name)))
                with self._database.transaction() as rows:
                    rows.execute("UPDATE removals SET noted = 1 WHERE id = ?", (removal_id,))
        except BaseError as error:
            log.warning("%s does not take a note of a removal: %s", self._place, str(error).partition("\n")[0])

    def apply(self, removers: Mapping[str, Callable[[str], object]]) -> int:
        """Do again what the catalog, a copy of before, does not know to be removed; returns how many.

        `removers` remove the named by kind, also what is not there. Raises DataDirectoryError.
        """
        with self._database.reading() as rows:
            known = {removal_id for (removal_id,) in map(tuple, rows.execute("SELECT id FROM removals").fetchall())}
        try:
            found = [each["path"] for page in obstore.list(self._files) for each in page]
            removals = {
                removal_id: msgspec.json.decode(bytes(obstore.get(self._files, removal_id).bytes()), type=_Removal)
                for removal_id in found
                if removal_id not in known
            }
        except (BaseError, msgspec.MsgspecError) as error:
            raise DataDirectoryError(f"--removals: {self._place}: {str(error).partition(chr(10))[0]}") from error
        for removal_id, removal in removals.items():
            removers[removal.kind](removal.name)
            with self._database.transaction() as rows:
                rows.execute(
                    "INSERT INTO removals VALUES (?, ?, ?, 1) ON CONFLICT DO NOTHING",
                    (removal_id, removal.kind, removal.name),
                )
        return len(removals)
