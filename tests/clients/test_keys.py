"""`loraplex keys` against a real store."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.adapter_store.records import Rows
from loraplex.cli.__main__ import app
from loraplex.runtime.rpc.errors import Unavailable
from loraplex.runtime.tenancy.api_keys import ApiKeyReader, split_api_key


async def keys(store: str, *arguments: str) -> str:
    command = ["keys", *arguments, *(["--store", store] if arguments[0] != "bootstrap" else [])]
    result = await asyncio.to_thread(CliRunner().invoke, app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


async def test_a_key_s_life(store: str, tmp_path: Path) -> None:
    file = tmp_path / "acme.key"
    said = await keys(store, "create", "--tenant", "acme", "--label", "ci", "--ttl", "90d", "--out", str(file))
    text = file.read_text().strip()
    parts = split_api_key(text)
    assert parts is not None
    assert text not in said
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    [listed] = json.loads(await keys(store, "list", "--json"))
    assert (listed["tenant"], listed["role"], listed["label"]) == ("acme", "tenant-user", "ci")
    rotated = (await keys(store, "rotate", parts[0], "--grace", "0s")).strip()
    assert split_api_key(rotated) not in {None, parts}
    assert f"revoked {parts[0]}" in await keys(store, "revoke", parts[0])
    assert "ci" in await keys(store, "list", "--tenant", "acme")
    assert "ci" not in await keys(store, "list", "--tenant", "globex")


async def test_a_key_whose_answer_is_lost_is_made_once_and_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, whole, losses = (
        Store(StoreSettings(data=tmp_path / "data", port=0)),
        EmbeddedDatabase.transaction,
        list[int](),
    )
    await running.start()
    reader, store = ApiKeyReader(running._directory), f"127.0.0.1:{running.port}"

    def is_valid(text: str) -> bool:
        return reader.read((("authorization", f"Bearer {text}"),), {}) is not None

    @contextmanager
    def losing(database: EmbeddedDatabase) -> Iterator[Rows]:
        with whole(database) as rows:
            yield rows
        if losses:
            losses.pop()
            raise Unavailable("the database does not answer", reason="DATABASE_DOWN")

    monkeypatch.setattr(EmbeddedDatabase, "transaction", losing)
    losses.append(1)
    made = (await keys(store, "create", "--tenant", "acme")).strip()
    assert is_valid(made)
    losses.append(1)
    rotated = (await keys(store, "rotate", made.split("_")[1])).strip()
    assert not losses
    assert is_valid(made), "the first try's secret took the place of no other"
    assert is_valid(rotated)
    assert len(json.loads(await keys(store, "list", "--json"))) == 1
    await running.stop(0)


async def test_a_bootstrap_key_is_a_new_private_file(store: str, tmp_path: Path) -> None:
    file = tmp_path / "operator.key"
    await keys(store, "bootstrap", str(file))
    assert split_api_key(file.read_text().strip()) is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(Exception, match="exists already"):
        await keys(store, "bootstrap", str(file))
