"""Backups: a copy of a directory or a bucket, made while its store runs, which a store can run on."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from loraplex.adapter_store.embedded import open_database
from loraplex.adapter_store.storage import CorruptBlob, DataDirectoryError
from loraplex.contracts.artifacts.names import AdapterName
from loraplex.transfers import backup
from tests.adapter_store.sources.places import bucket_of
from tests.adapter_store.test_shared_catalog import parts
from tests.postgres_server import PostgresServer


def test_a_copy_is_a_store_on_any_database_with_files_in_a_directory_or_a_bucket(
    tmp_path: Path, seaweed_url: str, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": seaweed_url}.items():
        monkeypatch.setenv(name, value)
    bucket_of(seaweed_url)
    store = parts(tmp_path / "a")
    contents = [b"%d" % number * 1_000_000 for number in range(3)]
    names = [store.publish(content, AdapterName("acme", f"n{at}")).name for at, content in enumerate(contents)]
    store.database.close()
    store.data.close()
    shared, moved = (postgres.new_database() for _ in range(2))
    ways = ["a", f"s3://acme/copy {shared}", f"s3://acme/copy {moved}", "b", f"c {postgres.new_database()}"]
    at = [
        backup.place("--to", [name if "://" in name else str(tmp_path / name) for name in way.split()]) for way in ways
    ]
    for here, there in pairwise(at):
        assert backup.copy(here, there) == 4
        with pytest.raises(DataDirectoryError, match="is not empty"):
            backup.copy(here, there)
    with (
        closing(open_database("", tmp_path / "b" / "catalog.db")) as copied,
        closing(open_database(moved, tmp_path)) as one,
    ):
        assert (
            copied.numbers()
            == one.numbers()
            == {
                "adapters": 3,
                "revisions": 3,
                "release_events": 0,
                "budget_events": 0,
                "batch_files": 0,
                "batches": 0,
                "batch_events": 0,
            }
        )
    bucket = bucket_of(seaweed_url, "copy")
    for copy in (
        parts(tmp_path / "b"),
        parts(tmp_path / "c", None, at[-1].database),
        parts(tmp_path / "d", bucket, moved),
    ):
        assert [copy.read(name) for name in names] == contents
        assert copy.data.clean(copy.database.referenced_blobs()) == 0
        copy.catalog.delete(names[0].adapter_name, "", purge=True)
        copy.database.close()
        copy.data.close()


def test_a_damaged_file_is_named_and_no_catalog_is_written(tmp_path: Path) -> None:
    store = parts(tmp_path / "a")
    revision = store.publish(b"weights")
    (tmp_path / "a" / "blobs" / revision.weights.digest.partition(":")[2]).write_bytes(b"weightz")
    with pytest.raises(CorruptBlob, match=revision.weights.digest):
        backup.copy(backup.Place(str(tmp_path / "a")), backup.Place(str(tmp_path / "b")))
    store.database.close()
    store.data.close()
    command = [
        sys.executable,
        "-m",
        "loraplex.transfers.backup",
        "--from",
        str(tmp_path),
        "--to",
        str(tmp_path / "c"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: --from: {tmp_path} has no catalog.db: it is not a store's directory\n"
