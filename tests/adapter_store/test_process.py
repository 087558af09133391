"""`loraplex store` as a process: start, refusals, SIGTERM, and kill -9 at any moment.

`STORE_KILLS=20` kills more often than the gate does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.app import StoreSettings
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.rpc.settings import SettingsError, read_settings

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

Process = asyncio.subprocess.Process
SEED = 17
KILLS = int(os.environ.get("STORE_KILLS", "2"))


async def spawn(*flags: str, **environ: str) -> Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loraplex.adapter_store", *flags, stdout=pipe, stderr=pipe, env={**os.environ, **environ}
    )


@asynccontextmanager
async def running(data: Path) -> AsyncIterator[tuple[Process, str]]:
    """A store that is ready, and its address; killed at the end unless it has ended."""
    process = await spawn("--data", str(data), "--port", "0", "--operator-host", "127.0.0.2")
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("ready store=127.0.0.1:"), line
        assert " metrics=127.0.0.2:" in line, line  # they have no credential, and name tenants
        yield process, line.split()[1].removeprefix("store=")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def modes_below(directory: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in (directory, *directory.rglob("*"))}


async def test_it_serves_until_sigterm(data: Path) -> None:
    async with running(data) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert modes_below(data) == {0o700, 0o600}
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ((), {}, "missing setting: give --data"),
        (("--data", "x", "--host", "0.0.0.0"), {}, "--host 0.0.0.0: clients beyond this machine could name any tenant"),
        (("--data", "x", "--port", "99999"), {}, "--port: 99999 is not a port"),
        (("--data", "x", "--max-adapter-bytes", "0"), {}, "--max-adapter-bytes 0: at least 1"),
        (("--data", "x"), {"LORAPLEX_ADAPTER_STORE_COLOUR": "red"}, "unknown environment variable"),
    ],
)
def test_bad_settings_are_refused(flags: tuple[str, ...], environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}"):
        read_settings(StoreSettings, "adapter-store", flags, environ)


async def test_start_up_is_refused_in_one_line() -> None:
    process = await spawn("--data", "/dev/null/x")
    out, err = await process.communicate()
    assert process.returncode == 2
    assert out == b""
    assert err.startswith(b"error: --data: /dev/null/x cannot be used")
    assert err.count(b"\n") == 1


async def test_kill_9_at_any_moment_loses_nothing_acknowledged_and_shows_nothing_half(
    data: Path, connect: Callable[[str], Client], hash_base: BaseModel
) -> None:
    chance = random.Random(SEED)
    acknowledged: dict[str, dict[str, bytes]] = {}
    sent: dict[str, dict[str, bytes]] = {}

    async def upload_on_and_on(client: Client, lane: str, done: asyncio.Semaphore) -> None:
        for number in itertools.count():
            name = f"{lane}-{number}"
            sent[name] = {CONFIG_FILE: b'{"r": %d}' % number, WEIGHTS_FILE: chance.randbytes(300_000)}
            try:
                await client.upload(name, sent[name])
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                return  # grpc.aio reports either of a server that is gone
            acknowledged[name] = sent[name]
            done.release()

    for round_ in range(KILLS):
        async with running(data) as (process, address):
            client = connect(address)
            await client.register(hash_base)
            await check(client, acknowledged, sent)
            done = asyncio.Semaphore(0)
            lanes = [asyncio.create_task(upload_on_and_on(client, f"r{round_}l{lane}", done)) for lane in range(4)]
            for _ in range(chance.randrange(1, 12)):
                await done.acquire()
            for _ in range(chance.randrange(300)):
                await asyncio.sleep(0)  # somewhere in the middle of the next ones
            process.kill()
            await asyncio.gather(*lanes)
            await client.close()
    async with running(data) as (_, address):
        client = connect(address)
        await check(client, acknowledged, sent)
        await client.close()
        assert not list((data / "uploads").iterdir())


async def check(client: Client, acknowledged: dict[str, dict[str, bytes]], sent: dict[str, dict[str, bytes]]) -> None:
    """Every adapter listed is whole and as it was sent; every one that was acknowledged is listed."""
    adapters = (await client.call("ListAdapters", pb.ListAdaptersRequest(page_size=1000))).adapters
    names = {adapter.name.rpartition("/")[2] for adapter in adapters}
    assert set(acknowledged) <= names, f"seed {SEED}"
    for name in names:
        revision = (await client.get(name)).revision
        assert (await client.download(revision.name))[1] == sent[name], f"seed {SEED}"
