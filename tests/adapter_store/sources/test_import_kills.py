"""Stores as processes: kill -9 at any moment of an import, and two stores on one bucket and database.

`STORE_KILLS=50` kills more often than the gate does, and stores on a bucket too.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import obstore
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.admin.v1 import plans_pb2, plans_pb2_grpc
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from tests.adapter_store.sources.places import Hub, bucket_of, served
from tests.postgres_server import PostgresServer

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

SEED = 29
KILLS = int(os.environ.get("STORE_KILLS", "1"))
KINDS = ["directory"] if KILLS == 1 else ["directory", "bucket"]
FILES = {CONFIG_FILE: b'{"peft_type": "LORA", "r": 8}', WEIGHTS_FILE: bytes(range(256)) * 12_000}
TENANT = (("x-loraplex-tenant", "acme"),)


@asynccontextmanager
async def running(data: Path, *flags: str, url: str = "") -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A store that is ready, and its address; killed at the end."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    environ = {**os.environ, **keys, "AWS_ENDPOINT_URL": url}
    command = [sys.executable, "-m", "loraplex.adapter_store", "--data", str(data), "--port", "0", *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if not line.startswith("ready store="):
            raise AssertionError((await process.communicate())[1].decode())
        yield process, line.split()[1].removeprefix("store=")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("kind", KINDS)
async def test_kill_9_at_any_moment_of_an_import_shows_all_of_it_or_nothing(
    kind: str, tmp_path: Path, connect: Callable[[str], Client], hash_base: BaseModel, request: pytest.FixtureRequest
) -> None:
    url, flags = "", []
    if kind == "bucket":
        url = request.getfixturevalue("seaweed_url")
        bucket_of(url)
        flags = ["--bucket", "s3://acme/killed", "--database", request.getfixturevalue("postgres").new_database()]
    chance, hub = random.Random(SEED), Hub(dict(FILES))
    requests: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def note() -> None:
        loop.call_soon_threadsafe(requests.put_nowait, None)

    hub.before_file = note
    shown = 0
    with served(hub.answer) as hub_url:
        sources = tmp_path / "sources.toml"
        sources.write_text(f'[[source]]\nprefix = "hf://acme"\nendpoint = "{hub_url}"\nallow_private = true\n')
        flags += ["--sources", str(sources)]
        for number in range(KILLS + 1):
            async with running(tmp_path / "data", *flags, url=url) as (process, address):
                client = connect(address)
                if not number:
                    await client.register(hash_base)
                adapters = (await client.call("ListAdapters", pb.ListAdaptersRequest(page_size=1000))).adapters
                assert len(adapters) >= shown, f"seed {SEED}"
                for adapter in adapters:
                    revision = (await client.get(adapter.name)).revision
                    assert (await client.download(revision.name))[1] == FILES, f"seed {SEED}"
                assert not list((tmp_path / "data" / "uploads").iterdir())
                shown = len(adapters)
                if number < KILLS:
                    asked = pb.ImportRevisionRequest(adapter=f"n{number}", source="hf://acme/support")
                    call = client.stub.ImportRevision(asked, metadata=TENANT)
                    reading = asyncio.ensure_future(read_all(call))
                    for _ in range(chance.randrange(1, 3)):  # the configuration, or the weights too
                        await requests.get()
                    await asyncio.wait([reading], timeout=chance.uniform(0, 0.15))
                    process.kill()
                    await reading
                    while not requests.empty():
                        requests.get_nowait()
                await client.close()


async def read_all(call: AsyncIterator[object]) -> None:
    """Read a call to its end, which may be the store's."""
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        return


async def test_two_stores_on_one_bucket_serve_what_the_other_one_has_just_made(
    tmp_path: Path, connect: Callable[[str], Client], hash_base: BaseModel, seaweed_url: str, postgres: PostgresServer
) -> None:
    bucket = bucket_of(seaweed_url, "two")
    flags = ["--bucket", "s3://acme/two", "--database", postgres.new_database()]
    async with (
        running(tmp_path / "a", *flags, url=seaweed_url) as (process, one),
        running(tmp_path / "b", *flags, url=seaweed_url) as (_, two),
    ):
        first, second = connect(one), connect(two)
        await first.register(hash_base)
        for number in range(5):
            uploaded = await (first, second)[number % 2].upload(f"n{number}", FILES)
            other = (second, first)[number % 2]
            assert (await other.get(f"n{number}")).revision == uploaded.revision
            assert (await other.download(uploaded.revision.name))[1] == FILES
        async with grpc.aio.insecure_channel(one) as channel:
            plan = plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name="tenants/acme", adapters=5))
            await plans_pb2_grpc.PlanServiceStub(channel).SetPlan(plan)
        moves = [
            client.call("SetAlias", pb.SetAliasRequest(adapter="n0", alias=f"a{n}", digest=uploaded.revision.digest))
            for n in range(20)
            for client in (first, second)
        ]
        await asyncio.gather(*moves)
        assert len((await second.get("n0")).adapter.aliases) == 21
        with pytest.raises(grpc.aio.AioRpcError, match="adapters 5"):  # the moves have brought the plan
            await second.upload("n6", FILES)
        process.kill()  # the other one does not need it
        await process.wait()
        await second.call("DeleteAdapter", pb.DeleteAdapterRequest(name="n0"))
        assert (await second.get("n1")).revision.digest == uploaded.revision.digest
        await asyncio.gather(first.close(), second.close())
    places = [each["path"] for page in obstore.list(bucket, "blobs/") for each in page]
    assert len(places) == 2
