"""Test operators' commands at a worker where two tenants have pinned adapters of the same bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from loraplex.contracts.broker.commands import Command, Verb
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest
from loraplex.worker.io.commands import OperatorCommands
from loraplex.worker.ipc import Loaded, Warm


def pin_of(tenant: str) -> AdapterRequest:
    return AdapterRequest(AdapterRef(f"tenants/{tenant}/adapters/a/revisions/sha256:0", "sha256:0", 4, 100), tenant)


async def test_a_purge_leaves_a_pin_that_another_tenant_has_too() -> None:
    read, never = asyncio.Event(), asyncio.Event()
    told = [Command(Verb.PIN, pin_of("globex"))]

    async def pins() -> list[AdapterRequest]:
        return [pin_of("acme")]

    async def next_command(incarnation: str, wait_s: float) -> Command:
        if not told:
            read.set()
            await never.wait()
        return told.pop()

    async def fetch(*args: Any) -> None:
        await never.wait()

    queue: Any = SimpleNamespace(pins=SimpleNamespace(list=pins), commands=SimpleNamespace(next=next_command))
    disk_pin = SimpleNamespace(fetch=fetch, release=lambda: None)
    fetcher: Any = SimpleNamespace(disk_pin=lambda: disk_pin)
    engine: Any = SimpleNamespace(send=lambda message: None)
    commands = OperatorCommands(queue, engine, fetcher, max_rank=8)
    running = asyncio.create_task(commands.run("w", asyncio.Event()))
    await read.wait()
    assert commands.forget_tenant("globex") == 1
    assert [adapter.revision for adapter in commands.adapters] == [pin_of("acme").adapter.revision]
    assert commands.forget_tenant("globex") == 0
    assert commands.forget_tenant("acme") == 1
    assert not list(commands.adapters)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await commands.close()


@pytest.mark.parametrize("error", ["", "out of memory"])
async def test_a_warm_adapter_may_leave_the_disk_once_the_engine_has_answered(error: str) -> None:
    sent, released = asyncio.Queue[Any](), asyncio.Event()
    told, never = [Command(Verb.WARM, pin_of("acme"))], asyncio.Event()

    async def next_command(incarnation: str, wait_s: float) -> Command:
        if not told:
            await never.wait()
        return told.pop()

    async def fetch(*args: Any) -> list[Path]:
        return [Path("/adapters/a")]

    disk_pin = SimpleNamespace(fetch=fetch, invocation_of=AsyncMock(return_value=()), release=released.set)
    queue: Any = SimpleNamespace(
        pins=SimpleNamespace(list=AsyncMock(return_value=[])), commands=SimpleNamespace(next=next_command)
    )
    engine: Any = SimpleNamespace(send=sent.put_nowait)
    commands = OperatorCommands(queue, engine, cast(Any, SimpleNamespace(disk_pin=lambda: disk_pin)), max_rank=8)
    running = asyncio.create_task(commands.run("w", asyncio.Event()))
    assert isinstance(await sent.get(), Warm)
    assert not released.is_set()
    commands.loaded(Loaded("sha256:0", error))
    assert released.is_set()
    assert not list(commands.adapters)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await commands.close()
