"""Purges and revocations hold for a catalog that is restored from a copy of before them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.embedded import open_database
from loraplex.adapter_store.removals import Removals
from loraplex.adapter_store.storage import DataDirectoryError
from loraplex.contracts.plans import Plan
from loraplex.runtime.rpc.principal import Role
from loraplex.transfers.backup import copy, place


def key_of(store: Store, tenant: str) -> str:
    return store._keys.create(tenant, Role.TENANT_USER, frozenset[str](), "", None)[0].key_id


@pytest.mark.parametrize("scheme", ["", "file://"])  # a directory, and the URL of what is read as a bucket
async def test_a_restored_catalog_has_no_purged_tenant_and_no_revoked_key(tmp_path: Path, scheme: str) -> None:
    (notes := tmp_path / "backups" / "removals").mkdir(parents=True)
    settings = StoreSettings(data=tmp_path / "a", port=0, removals=f"{scheme}{notes}")
    store = Store(settings)
    await store.start()
    kept, revoked, purged = key_of(store, "acme"), key_of(store, "acme"), key_of(store, "globex")
    store._plans.set("tenants/globex", Plan(weight=2.0), "")
    copy(place("--from", [str(tmp_path / "a")]), place("--to", [str(tmp_path / "backups" / "copy")]))
    store._keys.revoke(revoked)
    store._purge.purge("globex")
    again = key_of(store, "globex")  # the name is used again
    store._removals.note()
    await store.stop(drain_s=0)
    await store.start()
    assert [store._directory.is_valid(key) for key in (kept, revoked, purged, again)] == [True, False, False, True]
    await store.stop(drain_s=0)

    copy(place("--from", [str(tmp_path / "backups" / "copy")]), place("--to", [str(tmp_path / "b")]))
    for _ in range(2):
        restored = Store(StoreSettings(data=tmp_path / "b", port=0, removals=settings.removals))
        await restored.start()
        assert [restored._directory.is_valid(key) for key in (kept, revoked, purged)] == [True, False, False]
        assert restored._plans.of("globex").weight is None
        key = key_of(restored, "globex")
        restored._removals.note()
        await restored.stop(drain_s=0)
    await restored.start()
    assert restored._directory.is_valid(key), "a purge is done again once"
    await restored.stop(drain_s=0)


async def test_a_note_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "removals").mkdir()
    (tmp_path / "removals" / "key-1").write_text("{")
    with pytest.raises(DataDirectoryError, match=r"--removals: .*removals: "):
        await Store(StoreSettings(data=tmp_path, port=0)).start()


@pytest.mark.parametrize(
    ("content", "message"), [('{"kind": "plan", "name": "x"}', "Invalid enum value 'plan'"), ("{", "truncated")]
)
def test_a_note_of_another_kind_or_no_note_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "key-1").write_text(content)
    with (
        closing(open_database("", tmp_path / "catalog.db")) as database,
        pytest.raises(DataDirectoryError, match=f"--removals: .*{message}"),
    ):
        Removals(database, str(tmp_path / "notes")).apply({})


def test_a_place_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        closing(open_database("", tmp_path / "catalog.db")) as database,
        pytest.raises(DataDirectoryError, match=r"--removals: .*file/notes: Not a directory"),
    ):
        Removals(database, str(tmp_path / "file" / "notes"))
