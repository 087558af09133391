"""`loraplex adapters grant`, `grants` and `ungrant` against a real store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex_client import AsyncStoreClient, NotFoundError

NAME = "tenants/acme/adapters/support"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A directory with an adapter of the hash model."""
    directory = tmp_path / "support"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


async def command(*arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


async def test_a_grant_s_life(store: str, adapter: Path) -> None:
    await command("models", "push", "hash:?", "--store", store)
    await command("adapters", "push", str(adapter), "--name", "support", "--tenant", "acme", "--store", store)
    of_acme = ("--tenant", "acme", "--store", store)
    said = await command("adapters", "grant", "support", "--to", "globex", "--ttl", "30d", *of_acme)
    assert said.strip() == f"globex may use {NAME} for 30d"
    [granted] = json.loads(await command("adapters", "grants", "support", "--json", *of_acme))
    assert (granted["tenant"], granted["expire_time"] is not None) == ("globex", True)
    assert "globex" in await command("adapters", "grants", "support", *of_acme)
    async with AsyncStoreClient(store, "globex") as client:
        assert (await client.get(NAME))[0].name == NAME
        await command("adapters", "ungrant", "support", "--to", "globex", *of_acme)
        with pytest.raises(NotFoundError):
            await client.get(NAME)
