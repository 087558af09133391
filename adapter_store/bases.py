"""Manifests and small files of base models. Its calls block: make them in a thread."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Mapping

from adapter_store.database import Database
from adapter_store.records import Base, Blob, NewBase
from adapter_store.storage import BlobReader, DataDirectory, Upload
from artifacts.base_model import BaseModel, ModuleShape
from rpc.errors import AlreadyExists, InvalidField, NotFound

_FIELDS = tuple(field.name for field in dataclasses.fields(BaseModel))


class BaseModels:
    """The registered base models."""

    def __init__(self, database: Database, data: DataDirectory) -> None:
        self._database = database
        self._data = data

    def get(self, name: str) -> Base:
        """Return a model. Raises NotFound."""
        with self._database.reading() as rows:
            return _get(rows, name)

    def get_or_only(self, name: str, field: str) -> Base:
        """Return a model; an empty name means the only one. Raises NotFound, or InvalidField if there are several."""
        if name:
            return self.get(name)
        models = self.list_bases("", limit=2)
        if not models:
            raise NotFound("base model", "none is registered")
        if len(models) > 1:
            raise InvalidField(field, "the store knows several base models; name one, or set default_model in a plan")
        return models[0]

    def list_bases(self, after: str, limit: int) -> list[Base]:
        """Return models in order of name, from the first after `after`."""
        with self._database.reading() as rows:
            selected = rows.execute("SELECT * FROM base_models WHERE name > ? ORDER BY name LIMIT ?", (after, limit))
            return [_to_base(rows, row) for row in selected.fetchall()]

    def register(self, new: NewBase, upload: Upload) -> Base:
        """Keep a model with the upload's files; the same model again changes nothing.

        Raises AlreadyExists where the name has another digest, manifest or files and `replace` is not set.
        """
        manifest, files = new.manifest, new.files
        blobs = {blob.digest for blob in files.values()}
        with self._database.swept(self._data, blobs), self._database.transaction() as rows:
            registered = _find(rows, manifest.name)
            if registered is not None:
                if registered.files == files and registered.manifest == manifest:
                    return registered
                if not new.replace:
                    raise AlreadyExists(_what_differs(registered, manifest))
                blobs |= {blob.digest for blob in registered.files.values()}
                rows.execute("DELETE FROM base_models WHERE name = ?", (manifest.name,))
            _insert(rows, manifest, files)
            for name, blob in files.items():
                self._data.keep(upload.path / name, blob)
            return _get(rows, manifest.name)

    def open(self, name: str) -> tuple[Base, dict[str, BlobReader]]:
        """Open a model's files; returns model and readers of the same moment. Raises NotFound, CorruptBlob."""
        with self._database.reading() as rows:
            base = _get(rows, name)
            return base, self._data.open(base.files)


def _what_differs(registered: Base, manifest: BaseModel) -> str:
    if registered.manifest.digest != manifest.digest:
        return (
            f"base model {manifest.name} is registered with digest {registered.manifest.digest}, not {manifest.digest}"
        )
    return f"base model {manifest.name} is registered with the same weights but another manifest or other small files"


def _get(rows: sqlite3.Connection, name: str) -> Base:
    base = _find(rows, name)
    if base is None:
        raise NotFound("base model", name)
    return base


def _find(rows: sqlite3.Connection, name: str) -> Base | None:
    row = rows.execute("SELECT * FROM base_models WHERE name = ?", (name,)).fetchone()
    return None if row is None else _to_base(rows, row)


def _to_base(rows: sqlite3.Connection, row: sqlite3.Row) -> Base:
    # A store of a later version may have written fields that this one does not know. The digest stands for all that
    # changes answers, so a worker of such a base still finds that it is another one.
    fields = {field: value for field, value in json.loads(row["manifest"]).items() if field in _FIELDS}
    for field in ("end_token_ids", "tasks", "labels"):
        fields[field] = tuple(fields[field])
    fields["modules"] = tuple(ModuleShape(*module) for module in fields["modules"])
    files = rows.execute("SELECT name, digest, bytes FROM base_files WHERE model = ? ORDER BY name", (row["name"],))
    return Base(
        manifest=BaseModel(**fields),
        files={file["name"]: Blob(file["digest"], file["bytes"]) for file in files},
        create_ns=row["create_ns"],
    )


def _insert(rows: sqlite3.Connection, manifest: BaseModel, files: Mapping[str, Blob]) -> None:
    fields = {name: getattr(manifest, name) for name in _FIELDS}
    fields["modules"] = [dataclasses.astuple(module) for module in manifest.modules]
    del fields["files"]
    rows.execute(
        "INSERT INTO base_models (name, digest, manifest, create_ns) VALUES (?, ?, ?, ?)",
        (manifest.name, manifest.digest, json.dumps(fields), time.time_ns()),
    )
    rows.executemany(
        "INSERT INTO base_files (model, name, digest, bytes) VALUES (?, ?, ?, ?)",
        [(manifest.name, name, blob.digest, blob.size) for name, blob in files.items()],
    )
