"""`loraplex plans` against a real store."""

from __future__ import annotations

import asyncio
import json

import pytest
from typer.testing import CliRunner

from loraplex.cli.__main__ import app

MODEL = {"default_model": "Qwen/Qwen3-0.6B"}


async def plans(store: str, *arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["plans", *arguments, "--store", store])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


async def test_limits_are_set_one_by_one(store: str) -> None:
    assert "tokens_per_day=0" in await plans(store, "set", "tenants/acme", "tokens_per_day=0", "weight=1.5")
    await plans(store, "set", "tenants/acme", "weight=", "adapters=20", "default_model=Qwen/Qwen3-0.6B")
    shown = json.loads(await plans(store, "show", "tenants/acme", "--json"))
    assert shown == {"name": "tenants/acme", "etag": shown["etag"], "tokens_per_day": 0, "adapters": 20, **MODEL}
    assert "adapters" in await plans(store, "show", "tenants/acme")
    lists = await plans(store, "set", "tenants/acme", "allowed_models=Qwen/*,tiny", "allowed_adapters=a", "adapters=")
    assert "allowed_models=Qwen/*,tiny allowed_adapters=a" in lists
    await plans(store, "set", "tenants/acme", "allowed_models=Qwen/*", "allowed_adapters=")
    shown = json.loads(await plans(store, "show", "tenants/acme", "--json"))
    assert shown == {**shown, "allowed_models": ["Qwen/*"], **MODEL}
    assert "allowed_adapters" not in shown
    with pytest.raises(Exception, match="default_model: large is not among allowed_models"):
        await plans(store, "set", "tenants/acme", "default_model=large")
    assert [one["name"] for one in json.loads(await plans(store, "list", "--json"))] == ["tenants/acme"]
    assert "deleted tenants/acme" in await plans(store, "delete", "tenants/acme")
    assert json.loads(await plans(store, "list", "--json")) == []


@pytest.mark.parametrize("limit", ["tokens", "tokens_per_day=many", "tokens_per_week=1", "adapters=1" + "0" * 30])
async def test_a_bad_limit_is_named(store: str, limit: str) -> None:
    with pytest.raises(Exception, match=r"tokens|too large"):
        await plans(store, "set", "default", limit)
