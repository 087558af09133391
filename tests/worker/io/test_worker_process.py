"""A worker process from outside: its log, health, stalls, and its end. Real Valkey and store."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.cli import valkey
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.commands import DRAIN, CommandQueue
from loraplex.contracts.broker.connection import connect
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.messages import WorkerState
from loraplex_client import AsyncStoreClient

MODEL = "hash:?vocab=600&seed=3&step_ms=5"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Worker:
    """A worker process whose output is read line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self, words: str) -> str:
        """Return the next line of its output that contains the words."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            while line := (await self.process.stdout.readline()).decode():
                if words in line:
                    return line.strip()
        raise AssertionError(f"it ended without saying {words!r}")

    async def ends(self) -> int:
        """Wait for its end; returns the exit code."""
        async with asyncio.timeout(60):
            return await self.process.wait()


@asynccontextmanager
async def running(store: str, redis_url: str, *flags: str) -> AsyncIterator[Worker]:
    """Run a worker in a session of its own; kills it with its group at the end unless it has ended."""
    argv = [
        sys.executable,
        "-m",
        "loraplex.worker",
        "--model",
        MODEL,
        "--store",
        store,
        "--redis-url",
        redis_url,
        *flags,
    ]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True
    )
    try:
        yield Worker(process)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


@contextmanager
def valkey_in(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a Valkey server of the test's own."""
    with subprocess.Popen(valkey.command(directory), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert any(valkey.READY.search(line) for line in server.stdout), "Valkey ended before it was ready"
            yield server
        finally:
            server.kill()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a real store; returns its address."""
    command = [
        sys.executable,
        "-m",
        "loraplex.adapter_store",
        "--port",
        "0",
        "--data",
        str(tmp_path_factory.mktemp("store")),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split("store=")[1].split()[0]
        finally:
            process.kill()


@pytest.fixture
def directory() -> Iterator[Path]:
    """Make a directory for this test's Valkey; a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="lp-") as name:
        yield Path(name)


async def register(store: str, name: str) -> None:
    """Register the hash model under a name."""
    base = await asyncio.to_thread(read_base_model, MODEL, name)
    async with AsyncStoreClient(store, "acme") as client:
        await client.register_model(registered(base), base.files)


@asynccontextmanager
async def health_of(address: str) -> AsyncIterator[asyncio.Queue[int]]:
    """Collect every change of a process's health, the present one first."""
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def watch() -> None:
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            seen.put_nowait(answer.status)

    async with grpc.aio.insecure_channel(address) as channel:
        watching = asyncio.create_task(watch())
        yield seen
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def turns(seen: asyncio.Queue[int], status: int) -> None:
    """Wait for the next change, which must be to this status."""
    async with asyncio.timeout(60):
        assert await seen.get() == status


async def living(redis_url: str, name: str, count: int) -> list[WorkerState]:
    """Wait until `count` workers have a key; returns their states."""
    redis = await connect(redis_url)
    try:
        async with asyncio.timeout(60):
            while len(states := await Liveness(redis, Keys(name, "main")).live_workers()) != count:  # noqa: ASYNC110 - keys are all there is
                await asyncio.sleep(0.02)
    finally:
        await redis.aclose()
    return states


async def test_it_says_what_it_waits_for_and_serves_once_all_is_there(store: str, directory: Path) -> None:
    url = valkey.socket_url(directory)
    async with running(store, url, "--model-name", "late") as worker:
        address = (await worker.says("health at")).split()[-1]
        await worker.says("waits for Redis")
        async with health_of(address) as seen:
            await turns(seen, NOT_SERVING)
            with valkey_in(directory):
                await worker.says("waits for base model late to be registered")
                assert seen.empty()
                await register(store, "late")
                assert (await worker.says("ready worker=")).endswith(f"health={address}")
                await turns(seen, SERVING)
                worker.process.send_signal(signal.SIGTERM)
                await turns(seen, NOT_SERVING)
                assert await worker.ends() == 0


async def test_an_engine_that_stands_still_is_told_though_redis_hangs(store: str, directory: Path) -> None:
    url = valkey.socket_url(directory)
    await register(store, "still")
    with valkey_in(directory) as server:
        async with running(store, url, "--model-name", "still", "--stall-s", "1", "--replace-s", "4") as worker:
            address = (await worker.says("ready worker=")).split("health=")[1]
            (state,) = await living(url, "still", 1)
            async with health_of(address) as seen:
                await turns(seen, SERVING)
                os.kill(state.engine_pid, signal.SIGSTOP)
                await turns(seen, NOT_SERVING)
                await living(url, "still", 1)  # calls wait for it
                os.kill(state.engine_pid, signal.SIGCONT)
                await turns(seen, SERVING)
                (again,) = await living(url, "still", 1)
                assert (again.incarnation, again.engine_pid) == (state.incarnation, state.engine_pid)
                server.send_signal(signal.SIGSTOP)
                os.kill(state.engine_pid, signal.SIGSTOP)
                await turns(seen, NOT_SERVING)
                server.send_signal(signal.SIGCONT)
                await worker.says("ready worker=")  # with another engine
                await turns(seen, SERVING)
                (other,) = await living(url, "still", 1)
                assert other.incarnation != state.incarnation
                assert other.engine_pid != state.engine_pid


async def test_it_ends_though_redis_hangs_and_its_whole_group_is_told(store: str, directory: Path) -> None:
    url = valkey.socket_url(directory)
    await register(store, "hung")
    with valkey_in(directory) as server:
        async with running(store, url, "--model-name", "hung") as worker:
            await worker.says("ready worker=")
            server.send_signal(signal.SIGSTOP)
            os.killpg(worker.process.pid, signal.SIGTERM)
            assert await worker.ends() == 0
            server.send_signal(signal.SIGCONT)


async def test_an_operator_s_drain_ends_it_and_takes_its_key_and_room_back(store: str, directory: Path) -> None:
    url, keys = valkey.socket_url(directory), Keys("drained", "main")
    await register(store, "drained")
    with valkey_in(directory):
        async with running(store, url, "--model-name", "drained", "--worker-id", "w-1") as worker:
            await worker.says("ready worker=w-1")
            (state,) = await living(url, "drained", 1)
            redis = await connect(url)
            rooms = f"{keys.prefix}rooms"
            async with asyncio.timeout(60):
                while not await redis.hexists(rooms, "w-1"):  # noqa: ASYNC110 - keys are all there is
                    await asyncio.sleep(0.02)
            await CommandQueue(redis, keys).send(state.incarnation, DRAIN)
            assert await worker.ends() == 0
            assert await redis.exists(keys.worker(state.incarnation), keys.commands(state.incarnation)) == 0
            assert not await redis.hexists(rooms, "w-1")
            await redis.aclose()


async def test_a_redis_url_that_no_waiting_mends_is_refused(store: str) -> None:
    async with running(store, "http://127.0.0.1") as worker:
        await worker.says("error: --redis-url http://127.0.0.1")
        assert await worker.ends() == 2


@pytest.fixture
def engine_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every engine process of this test's children end with exit status 7 as soon as it starts."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'loraplex.worker.engine.process' in sys.orig_argv:\n    os._exit(7)\n"
    )
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.usefixtures("engine_dies")
async def test_a_worker_whose_engines_die_while_they_start_ends_and_says_why(store: str, directory: Path) -> None:
    await register(store, "dies")
    with valkey_in(directory):
        async with running(store, valkey.socket_url(directory), "--model-name", "dies") as worker:
            line = await worker.says("error:")
            assert "ended (exit status 7) before it served" in line
            assert "worker's log" in line
            assert await worker.ends() == 2
