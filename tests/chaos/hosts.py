"""The cluster on several hosts: every process in a network namespace of its own, all of them on one bridge.

`unshare ... python -m tests.chaos.hosts DIRECTORY HISTORY` (see UNSHARE) runs two routers, two workers, Valkey and the
store, and takes the cables of a worker and of a router out for five seconds each. All of the network is private to the
namespace that `unshare` makes, and goes with its last process.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis

from broker.connection import connect
from deploy.local import valkey
from deploy.local.cluster import ClusterSettings, LocalCluster
from rpc.children.process import Process
from tests.chaos.cluster import list_workers, push_adapter, register_model, what_is_left
from tests.chaos.driver import Driver
from tests.chaos.history import Begun, Fault, History, Left
from tests.chaos.plan import ADAPTERS, MODEL, TENANTS, Plan

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--kill-child")
CUT_S = 5.0
IDLE_S = 30.0
# The cuts: who, and how long after the first one.
_CUTS = (("worker-1", 0.0), ("router-1", 2.5))
_HOSTS = {"valkey": 2, "store": 3, "router-1": 11, "router-2": 12, "worker-1": 21, "worker-2": 22}


def refusal() -> str:
    """Return why such networks can't be made here; empty where they can."""
    for command in ("unshare", "ip", "mount"):
        if shutil.which(command) is None:
            return f"there is no {command} command"
    probe = [*UNSHARE, sys.executable, "-m", "tests.chaos.hosts"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    return (tried.stderr.strip().splitlines() or ["no reason given"])[-1] if tried.returncode else ""


def make_network() -> None:
    """The bridge and the hosts on it, or the end of the process and why."""
    # `ip` keeps its namespaces' names there; only those of this mount namespace are hidden.
    _run("mount", "-t", "tmpfs", "none", "/run")
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "bridge", "type", "bridge")
    _run("ip", "addr", "add", _address(1) + "/24", "dev", "bridge")
    _run("ip", "link", "set", "bridge", "up")
    for name, number in _HOSTS.items():
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", name, "master", "bridge", "up")
        for words in (("addr", "add", _address(number) + "/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _run("ip", "-n", name, *words)
        _run("ip", "-n", name, "link", "set", "lo", "up")


def _address(number: int) -> str:
    return f"10.77.0.{number}"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class HostCluster(LocalCluster):
    """Runs each process on its host."""

    async def _spawn(self, name: str, argv: list[str], environ: dict[str, str] | None = None) -> None:
        host = _address(_HOSTS[name])
        if "--host" in argv:
            argv[argv.index("--host") + 1] = host
            argv += ["--insecure-tenants", "true"]
        if name.startswith("router"):
            argv += ["--relay-host", host]
        await super()._spawn(name, ["ip", "netns", "exec", name, *argv], environ)


async def run(directory: Path, path: Path) -> None:
    """The cluster and its clients, who are on the bridge, while cables are taken out and put back."""
    history = History(path)
    plan = Plan(48, seed=1, faults=(), in_flight=24)
    history.append(Begun(MODEL, plan.seed, plan.requests, {"cable_cut": len(_CUTS)}))
    async with _redis(directory) as (url, redis), _cluster(directory, url) as cluster:
        await register_model(cluster.store)
        pushes = [(tenant, name) for tenant in TENANTS for name in ADAPTERS]
        revisions = [await push_adapter(cluster.store, directory / "pushed", *push) for push in pushes]
        await cluster.wait_serving()
        driver = Driver(plan, cluster.routers, revisions, history)
        async with asyncio.TaskGroup() as group:
            group.create_task(driver.run())
            group.create_task(_cut_all(plan, driver, history))
        history.append(await _left(cluster, redis))
    history.close()


@asynccontextmanager
async def _redis(directory: Path) -> AsyncIterator[tuple[str, Redis]]:
    address = _address(_HOSTS["valkey"])
    command = [*valkey.command(directory), "--port", "6379", "--bind", address, "--protected-mode", "no"]
    command = ["ip", "netns", "exec", "valkey", *command]
    process = await Process.start("valkey", command, log_path=directory / "valkey.log", ready=valkey.READY)
    try:
        await process.wait_ready()
        url = f"redis://{address}:6379"
        client = await connect(url)
        yield url, client
        await client.aclose()
    finally:
        await process.stop(2.0)


def _cluster(directory: Path, redis_url: str) -> HostCluster:
    flags = ("--rows", "12", "--drain-s", "0.5")
    settings = ClusterSettings(
        MODEL, workers=2, routers=2, port=0, store_port=0, data_dir=directory, redis_url=redis_url, worker_flags=flags
    )
    return HostCluster(settings)


async def _cut_all(plan: Plan, driver: Driver, history: History) -> None:
    """The cuts, and as many requests as there is room for while they last."""
    async with asyncio.TaskGroup() as group:
        cuts = [group.create_task(_cut(driver, history, number)) for number in range(len(_CUTS))]
        while not all(cut.done() for cut in cuts):
            await driver.allow_more(max(0, plan.in_flight - len(driver.live)))
            await asyncio.sleep(0.05)
    await driver.finish()


async def _cut(driver: Driver, history: History, number: int) -> None:
    name, after_s = _CUTS[number]
    await driver.until_streaming(6)
    await asyncio.sleep(after_s)
    fault = Fault(number, "cable_cut", name, driver.now, 0.0, driver.streaming)
    _run("ip", "link", "set", name, "down")
    try:
        if "state DOWN" in (shown := _run("ip", "-o", "link", "show", name)):
            fault.proof = shown.partition(" mode")[0]
        await asyncio.sleep(CUT_S)
    finally:
        _run("ip", "link", "set", name, "up")
    fault.mended = driver.now
    history.append(fault)


async def _left(cluster: LocalCluster, redis: Redis) -> Left:
    """Return what is still held after enough time to let go of it."""
    until = time.monotonic() + IDLE_S
    while True:
        workers = await list_workers(cluster.routers[1])
        left = await what_is_left(workers.values(), redis)
        if (len(workers) == 2 and not (left.blocks or left.pins or left.redis_keys)) or time.monotonic() > until:
            return left
        await asyncio.sleep(0.2)  # workers report twice a second


if __name__ == "__main__":
    make_network()
    if len(sys.argv) == 3:
        asyncio.run(run(Path(sys.argv[1]), Path(sys.argv[2])))
