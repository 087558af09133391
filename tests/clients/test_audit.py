"""`loraplex audit` with the log of a real store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc
from loraplex.cli.__main__ import app
from loraplex.cli.terminal import CommandError


def audit(*arguments: str | Path) -> str:
    """Run `loraplex audit`; return what it prints."""
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


async def make_keys(path: Path, *tenants: str) -> list[str]:
    """Run a store that makes a key for each tenant; return the keys."""
    store = Store(StoreSettings(data=path.parent / "data", port=0, audit=str(path)))
    await store.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{store.port}") as channel:
        stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
        api_keys = [(await stub.CreateKey(keys_pb2.CreateKeyRequest(tenant=tenant))).api_key for tenant in tenants]
    await store.stop(drain_s=0)
    return api_keys


async def test_a_store_s_log_is_verified_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    keys = await make_keys(path, "acme", "globex")
    keys += await make_keys(path, "acme")
    assert all(key.split("_", 2)[2] not in path.read_text() for key in keys)
    head = audit("verify", path).split()[-1]
    assert head.startswith("7:")
    printed = audit("show", path, "--tenant", "acme", "--since", "1h", "--json")
    shown = [json.loads(line) for line in printed.splitlines()]
    assert [record["details"]["key_id"] for record in shown] == [keys[0].split("_")[1], keys[2].split("_")[1]]
    assert "KeyService/CreateKey" in audit("show", path)
    assert audit("show", path, "--since", "2999-01-01").count("\n") == 1
    other = tmp_path / "router.jsonl"
    (tmp_path / "router.jsonl.1").write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    other.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[3:]))
    both = audit("verify", path, other, tmp_path / "router.jsonl.1").splitlines()
    assert both == [f"{log}: 7 records, head {head}" for log in (path, other)]
    with pytest.raises(CommandError, match="a head is of one log"):
        audit("verify", path, other, "--known", head)
    other.unlink()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    audit("verify", path)
    with pytest.raises(CommandError, match="not as it was written"):
        audit("verify", path, "--known", head)
    with pytest.raises(CommandError, match="--known"):
        audit("verify", path, "--known", "x")
    with pytest.raises(CommandError, match="--since"):
        audit("show", path, "--since", "x")
