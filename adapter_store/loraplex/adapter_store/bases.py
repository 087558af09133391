"""Manifests and small files of base models. Its calls block: make them in a thread."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from contextlib import suppress

from loraplex.adapter_store.database import Database
from loraplex.adapter_store.records import Base, Blob, NewBase, Row, Rows, marks
from loraplex.adapter_store.storage import BlobReader, DataDirectory, Keep, Upload
from loraplex.contracts.artifacts.base_model import BaseModel, ModuleShape
from loraplex.contracts.artifacts.generation_config import UNSAID, GenerationConfig
from loraplex.runtime.rpc.errors import AlreadyExists, InvalidField, NotFound

_FIELDS = tuple(field.name for field in dataclasses.fields(BaseModel))
_ROWS = """
SELECT *, name || '@' || digest AS position, CASE
    WHEN live_ns IS NULL THEN 'staged'
    WHEN live_ns = (SELECT max(live_ns) FROM base_models AS others WHERE others.name = base_models.name) THEN 'live'
    ELSE 'former'
END AS state FROM base_models
"""


class BaseModels:
    """The registered base models, each with the live revision, the former one and the last that was staged."""

    def __init__(self, database: Database, data: DataDirectory) -> None:
        self._database = database
        self._data = data

    def get(self, name: str) -> Base:
        """Return a model's live revision, or that of `NAME@DIGEST`. Raises NotFound."""
        with self._database.reading() as rows:
            return _get(rows, name)

    def has(self, name: str) -> bool:
        """Return whether a model of that name is registered."""
        with self._database.reading() as rows, suppress(NotFound):
            return bool(_get(rows, name))
        return False

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

    @staticmethod
    def position(base: Base) -> str:
        """Return the place of a revision in lists."""
        return f"{base.manifest.name}@{base.manifest.digest}"

    def list_bases(self, after: str, limit: int, *, all_revisions: bool = False) -> list[Base]:
        """Return revisions in order of position, from the first after `after`: the live ones, or all."""
        states = ("live", "staged", "former") if all_revisions else ("live",)
        with self._database.reading() as rows:
            selected = rows.execute(
                f"SELECT * FROM ({_ROWS}) AS listed WHERE position > ? AND state IN ({marks(states)}) "
                "ORDER BY position LIMIT ?",
                (after, *states, limit),
            )
            return [_to_base(rows, row) for row in selected.fetchall()]

    def register(self, new: NewBase, upload: Upload) -> Base:
        """Keep a model with the upload's files; the same model again changes nothing.

        Raises AlreadyExists where the live revision differs and neither `replace` nor `stage` is set, or where this
        revision has another manifest or files and `replace` is not set.
        """
        with self._data.staged(upload, new.files) as keep:
            return self._register(new, keep)

    def _register(self, new: NewBase, keep: Keep) -> Base:
        manifest, files = new.manifest, new.files
        name, position = manifest.name, f"{manifest.name}@{manifest.digest}"
        blobs = {blob.digest for blob in files.values()}
        with self._database.swept(self._data, blobs), self._database.transaction() as rows:
            live, same = _find(rows, name), _find(rows, position)
            if same is not None:
                known = (same.manifest.modules, _without_experts(manifest).modules)
                changed = (same.files, _without_experts(same.manifest)) != (files, _without_experts(manifest))
                if not changed and (new.stage or same.state == "live"):
                    if (
                        manifest.generation_config in (UNSAID, same.manifest.generation_config)
                        and manifest.modules in known
                    ):
                        return same
                    # Written below: a version that read less of its files has registered the model.
                elif not new.replace:
                    raise AlreadyExists(_what_differs(same, manifest) if changed else _not_live(same))
                blobs |= {blob.digest for blob in same.files.values()}
            elif live is not None and not (new.replace or new.stage):
                raise AlreadyExists(_what_differs(live, manifest))
            _insert(rows, manifest, files)
            for file in files:
                keep(rows, file)
            if live is None or not new.stage or (same is not None and same.state == "live"):
                _make_live(rows, manifest.name, manifest.digest)
            blobs |= _remove_others(rows, manifest)
            return _get(rows, position)

    def promote(self, name: str, digest: str) -> Base:
        """Make a revision of a model the live one. Raises NotFound."""
        with self._database.transaction() as rows:
            base = _get(rows, f"{name}@{digest}")
            if base.state != "live":
                _make_live(rows, name, digest)
            return _get(rows, name)

    def open(self, name: str) -> tuple[Base, dict[str, BlobReader]]:
        """Open a revision's files, named as in `get`; returns it and readers of the same moment.

        Raises NotFound, CorruptBlob.
        """
        with self._database.reading() as rows:
            base = _get(rows, name)
            return base, self._data.open(rows, base.files)


def _without_experts(manifest: BaseModel) -> BaseModel:
    """Return the manifest as a version that did not list experts has read it."""
    return dataclasses.replace(manifest, modules=tuple(one for one in manifest.modules if not one.experts))


def _what_differs(registered: Base, manifest: BaseModel) -> str:
    name, digest = manifest.name, registered.manifest.digest
    if digest != manifest.digest:
        return (
            f"base model {name} is registered with digest {digest}, not {manifest.digest}; "
            "stage this one beside it (loraplex models push --stage), or replace it at once (--replace)"
        )
    return f"base model {name} is registered with the same weights but another manifest or other small files"


def _not_live(base: Base) -> str:
    manifest = base.manifest
    return f"base model {manifest.name} has {manifest.digest} as a {base.state} revision; promote it"


def _get(rows: Rows, name: str) -> Base:
    base = _find(rows, name)
    if base is None:
        raise NotFound("base model", name)
    return base


def _find(rows: Rows, name: str) -> Base | None:
    column, wanted = ("position", name) if "@" in name else ("name", name)
    state = "" if "@" in name else "AND state = 'live'"
    row = rows.execute(f"SELECT * FROM ({_ROWS}) AS listed WHERE {column} = ? {state}", (wanted,)).fetchone()
    return None if row is None else _to_base(rows, row)


def _to_base(rows: Rows, row: Row) -> Base:
    # A store of a later version may have written fields that this one does not know. The digest stands for all that
    # changes answers, so a worker of such a base still finds that it is another one.
    fields = {field: value for field, value in json.loads(row["manifest"]).items() if field in _FIELDS}
    for field in ("end_token_ids", "tasks", "labels"):
        fields[field] = tuple(fields[field])
    fields["modules"] = tuple(ModuleShape(*module) for module in fields["modules"])
    fields["generation_config"] = GenerationConfig.of(fields.get("generation_config", {}))
    files = rows.execute(
        "SELECT name, digest, bytes FROM base_files WHERE model = ? AND revision = ? ORDER BY name",
        (row["name"], row["digest"]),
    )
    return Base(
        manifest=BaseModel(**fields),
        files={file["name"]: Blob(file["digest"], file["bytes"]) for file in files},
        create_ns=row["create_ns"],
        state=row["state"],
    )


def _insert(rows: Rows, manifest: BaseModel, files: Mapping[str, Blob]) -> None:
    fields = {name: getattr(manifest, name) for name in _FIELDS}
    fields["modules"] = [dataclasses.astuple(module) for module in manifest.modules]
    fields["generation_config"] = manifest.generation_config.given
    del fields["files"]
    revision = (manifest.name, manifest.digest)
    rows.execute("DELETE FROM base_files WHERE model = ? AND revision = ?", revision)
    rows.execute(
        "INSERT INTO base_models (name, digest, manifest, create_ns) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name, digest) DO UPDATE SET manifest = excluded.manifest, create_ns = excluded.create_ns",
        (*revision, json.dumps(fields), time.time_ns()),
    )
    rows.executemany(
        "INSERT INTO base_files (model, revision, name, digest, bytes) VALUES (?, ?, ?, ?, ?)",
        [(*revision, name, blob.digest, blob.size) for name, blob in files.items()],
    )


def _make_live(rows: Rows, name: str, digest: str) -> None:
    # Later than any other, also after a step of the clock.
    rows.execute(
        "UPDATE base_models SET live_ns = max(?, "
        "(SELECT coalesce(max(live_ns), 0) + 1 FROM base_models AS others WHERE others.name = base_models.name)) "
        "WHERE name = ? AND digest = ?",
        (time.time_ns(), name, digest),
    )


def _remove_others(rows: Rows, new: BaseModel) -> set[str]:
    """Remove the revisions but the new, the live, the former and the last staged one; return their files' digests."""
    kept = "SELECT digest FROM base_models WHERE name = :name AND live_ns {} NULL ORDER BY {} DESC LIMIT {}"
    gone = (
        "FROM base_models WHERE name = :name AND digest NOT IN "
        f"(SELECT * FROM ({kept.format('IS NOT', 'live_ns', 2)}) AS live UNION "
        f"SELECT * FROM ({kept.format('IS', 'create_ns', 1)}) AS staged)"
    )
    values = {"name": new.name}
    blobs = rows.execute(
        f"SELECT digest FROM base_files WHERE model = :name AND revision IN (SELECT digest {gone})", values
    ).fetchall()
    rows.execute(f"DELETE {gone}", values)
    return {row["digest"] for row in blobs}
