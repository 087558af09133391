"""The one-machine launcher with the real processes: what it starts, how it fails, and that nothing is left."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.runtime.rpc.children.process import LaunchError
from loraplex_client import AsyncClient, AsyncStoreClient

Leftovers = Callable[[], list[str]]

MODEL = "hash:?vocab=1000&seed=3"
SETTINGS = ClusterSettings(model=MODEL, port=0, store_port=0)
WAIT_S = 60.0


async def register(cluster: LocalCluster) -> None:
    """Make the hash model known, as `loraplex up` does; workers wait for it."""
    base = read_base_model(MODEL)
    async with AsyncStoreClient(cluster.store) as store:
        await store.register_model(registered(base), base.files)


async def answer(address: str) -> tuple[int, ...]:
    """Eight tokens of the router at `address`."""
    async with AsyncClient(address, timeout_s=WAIT_S) as client:
        return (await client.generate("hello", max_tokens=8)).token_ids


async def test_serves_takes_more_workers_and_leaves_nothing(leftovers: Leftovers, short_temp_dir: Path) -> None:
    async with LocalCluster(dataclasses.replace(SETTINGS, routers=2, workers=2)) as cluster:
        assert set(cluster.processes) == {"valkey", "store", "router-1", "router-2", "worker-1", "worker-2"}
        assert all(os.getsid(process.pid) == process.pid for process in cluster.processes.values())
        # Its workers wait for the model, and it goes on afterwards.
        with pytest.raises(LaunchError, match=r"not serving after 0\.01 s; worker-1 last said"):
            await cluster.wait_serving(timeout_s=0.01)
        await register(cluster)
        await cluster.wait_serving(WAIT_S)
        assert {path.name for path in (cluster.data_dir / "logs").iterdir()} == {f"{n}.log" for n in cluster.processes}
        assert cluster.routers[0] == cluster.router != cluster.routers[1]
        first, second = [await answer(address) for address in cluster.routers]
        assert first == second
        assert len(first) == 8
        name = await cluster.start_worker()
        assert name == "worker-3"
        await asyncio.wait_for(cluster.processes[name].wait_ready(), WAIT_S)
        cluster.kill("worker-1")
        await cluster.processes["worker-1"].exited
        cluster.kill("worker-2", signal.SIGTERM)
        await cluster.processes["worker-2"].exited
        assert await answer(cluster.router) == first
        failure = asyncio.create_task(cluster.wait_failed())
        os.kill(cluster.processes["router-2"].pid, signal.SIGKILL)  # not through `kill`: nobody meant it
        assert "router-2 was killed by SIGKILL" in str(await asyncio.wait_for(failure, WAIT_S))
        addresses = (cluster.router, cluster.store)
        processes = [cluster.processes[name] for name in ("valkey", "store", "router-1", "worker-3")]
    assert [process.exited.result() for process in processes] == [0, 0, 0, 0]
    for address in addresses:
        host, port = address.rsplit(":", 1)
        with socket.create_server((host, int(port))):  # the port is free again
            pass
    assert leftovers() == []


async def test_uses_a_redis_and_a_directory_that_are_given(
    leftovers: Leftovers, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what the launcher is told wins over what the processes would read themselves
    monkeypatch.setenv("LORAPLEX_REDIS_URL", "redis://127.0.0.1:1")
    async with LocalCluster(dataclasses.replace(SETTINGS, redis_url=valkey_url, data_dir=tmp_path / "data")) as cluster:
        assert "valkey" not in cluster.processes
        await register(cluster)
        await cluster.wait_serving(WAIT_S)
        assert len(await answer(cluster.router)) == 8
    assert (tmp_path / "data" / "logs" / "router-1.log").exists()
    assert leftovers() == []


async def test_a_directory_that_cannot_be_made_is_named(leftovers: Leftovers) -> None:
    with pytest.raises(LaunchError, match=r"^/proc/nowhere: No such file or directory$"):
        await enter(LocalCluster(dataclasses.replace(SETTINGS, data_dir=Path("/proc/nowhere"))))
    assert leftovers() == []


@pytest.mark.parametrize(("field", "flag"), [("port", "--port"), ("store_port", "--store-port")])
async def test_a_port_in_use_is_named_with_its_flag(leftovers: Leftovers, field: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"^cannot listen on 127.0.0.1:{port}: .*in use; .* {flag}, or 0"):
            await enter(LocalCluster(dataclasses.replace(SETTINGS, **{field: port})))
    assert leftovers() == []


async def test_engines_that_die_while_they_start_end_the_start(
    leftovers: Leftovers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'loraplex.worker.engine.process' in sys.orig_argv:\n    os._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    async def serve() -> None:
        async with LocalCluster(SETTINGS) as cluster:
            await register(cluster)
            await cluster.wait_serving(WAIT_S)

    # On a busy machine they may have died before the cluster's other processes are there.
    with pytest.raises(LaunchError, match=r"^worker-1: .*ended \(exit status 7\) before it served") as caught:
        await serve()
    assert "\n" not in str(caught.value)
    assert leftovers() == []


async def test_one_port_cannot_be_both(leftovers: Leftovers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LaunchError, match=f"--port and --store-port are both {port}"):
        await enter(LocalCluster(dataclasses.replace(SETTINGS, port=port, store_port=port)))
    assert leftovers() == []


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "http://127.0.0.1:1", "unix:///nowhere/valkey.sock"])
async def test_a_redis_that_does_not_answer_stops_the_start(leftovers: Leftovers, url: str) -> None:
    cluster = LocalCluster(dataclasses.replace(SETTINGS, redis_url=url))
    with pytest.raises(LaunchError, match="--redis-url") as caught:
        await enter(cluster)
    assert url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert cluster.processes == {}
    assert leftovers() == []


async def test_a_worker_that_refuses_its_model_is_quoted(leftovers: Leftovers, tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    with pytest.raises(LaunchError, match=f"^worker-1: .*{missing}"):
        async with LocalCluster(dataclasses.replace(SETTINGS, model=str(missing))) as cluster:
            await cluster.wait_serving(WAIT_S)
    assert leftovers() == []


@pytest.mark.parametrize("turns", [3, 30])  # of the event loop: while and after processes start
async def test_a_start_that_is_cancelled_leaves_nothing(leftovers: Leftovers, turns: int) -> None:
    entering = asyncio.create_task(LocalCluster(SETTINGS).__aenter__())
    for _ in range(turns):
        await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert leftovers() == []


async def test_a_stop_that_is_cancelled_kills_what_is_left(leftovers: Leftovers) -> None:
    cluster = LocalCluster(SETTINGS)
    await cluster.__aenter__()
    cluster.kill("router-1", signal.SIGSTOP)  # it will not end by itself
    stopping = asyncio.create_task(cluster.__aexit__())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert leftovers() == []


LAUNCHER = f"""
import asyncio
from loraplex.cli.local import ClusterSettings, LocalCluster

async def main():
    async with LocalCluster(ClusterSettings(model={MODEL!r}, port=0, store_port=0)) as cluster:
        print("up", flush=True)
        await cluster.wait_failed()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_nothing_outlives_a_launcher_that_is_killed(leftovers: Leftovers) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout:
        assert launcher.stdout.readline() == b"up\n"
        launcher.kill()
        launcher.wait()
    assert [left for left in leftovers() if left.startswith("process")] == []


async def enter(cluster: LocalCluster) -> None:
    """Start it, and stop it in case that this works."""
    async with cluster:
        pass
