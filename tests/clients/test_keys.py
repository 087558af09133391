"""`loraplex keys` against a real store."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.runtime.tenancy.api_keys import split_api_key


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


async def test_a_bootstrap_key_is_a_new_private_file(store: str, tmp_path: Path) -> None:
    file = tmp_path / "operator.key"
    await keys(store, "bootstrap", str(file))
    assert split_api_key(file.read_text().strip()) is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(Exception, match="exists already"):
        await keys(store, "bootstrap", str(file))
