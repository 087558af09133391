"""`loraplex tenants purge` and `loraplex adapters delete --purge` against a real store."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner

from clients.cli.__main__ import app
from clients.cli.terminal import CommandError


async def loraplex(store: str, *arguments: str, typed: str = "") -> str:
    """Run a command at the store; return what it prints."""
    command = [*arguments, "--store", store]
    result = await asyncio.to_thread(CliRunner().invoke, app, command, input=typed, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


async def test_a_purge_asks_and_prints_what_it_removed(store: str) -> None:
    key_id = (await loraplex(store, "keys", "create", "--tenant", "acme")).strip().split("_")[1]
    await loraplex(store, "plans", "set", "tenants/acme", "tokens_per_day=1")
    assert "removed" not in await loraplex(store, "tenants", "purge", "acme", typed="n\n")
    with pytest.raises(CommandError, match="--yes"):
        await loraplex(store, "tenants", "purge", "acme")
    said = await loraplex(store, "tenants", "purge", "acme", "--router", "", typed="y\n")
    assert f"removed keys/{key_id}\n" in said
    assert "removed plans/tenants/acme\n" in said
    assert said.splitlines()[-1].split() == ["store", "2", "0"]
    empty = json.loads(await loraplex(store, "tenants", "purge", "acme", "--yes", "--json", "--router", ""))
    assert empty == {"removed": [], "removed_count": 0, "left": [], "kept_for_others": [], "places": []}
