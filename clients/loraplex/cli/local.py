"""The one-machine cluster: Valkey, store, routers and workers as processes of this machine.

    async with LocalCluster(ClusterSettings(model="hash:?")) as cluster:   # store and routers listen
        ...register the model at cluster.store...
        await cluster.wait_serving()
        ...call cluster.router...
                                                                           # drained, stopped, nothing left behind
Order of start: Valkey and the store, then routers and workers together; routers and workers wait for what they need.
Order of stop: gateway, runner of batches, routers (all drain), workers, store, Valkey.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.cli import valkey
from loraplex.runtime.rpc.children.process import READY, LaunchError, Process
from loraplex.runtime.rpc.server import channel_options
from loraplex.runtime.rpc.tasks import unless_ended

log = logging.getLogger(__name__)

T = TypeVar("T")

# Order of stopping, with the timeout in seconds before SIGKILL; routers let running answers end first.
_STOP_ORDER = (("gateway", 15.0), ("runner", 15.0), ("router", 15.0), ("worker", 10.0), ("store", 5.0), ("valkey", 5.0))
# Timeout in seconds for an exit to be seen after a broken stream.
_EXIT_S = 2.0
# Maximum number of workers that are replaced in a minute.
_REPLACED_A_MINUTE = 5
# File of the first operator's API key in a directory of credentials.
FIRST_KEY = "first-operator.key"


@dataclass(frozen=True)
class ClusterSettings:
    """Settings of a local cluster. Port 0 lets the system choose; only the first router gets `port`."""

    # A transformers directory, or `hash:?...`.
    model: str
    model_name: str = ""
    workers: int = 1
    routers: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
    store_port: int = 50052
    # The gateway's port; None for no gateway.
    http_port: int | None = None
    # URL of a Redis; empty for an embedded Valkey.
    redis_url: str = ""
    # Directory of logs, adapters and caches; None for a temporary one.
    data_dir: Path | None = None
    # Directory with the files of `loraplex certs dev` and FIRST_KEY: TLS and credentials at every port. None: neither.
    credentials: Path | None = None
    # Flags of every worker, of every router and of the store, after the launcher's own.
    worker_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    store_flags: tuple[str, ...] = ()

    def flags_of_worker(self, index: int) -> list[str]:
        """Return the flags of the worker of an index, from 0 on: each has cores or CUDA devices of its own."""
        flags = ["--model", self.model, "--model-name", self.model_name]
        if self.workers > 1 and not any(flag.startswith("--device=cuda") for flag in self.worker_flags):
            flags += ["--threads", str(max(1, _cores() // self.workers))]
        flags += self.worker_flags
        if self.workers > 1 and "--device=cuda" in flags:
            ranks = [flag.partition("=")[2] for flag in flags if flag.startswith("--tensor-parallel=")]
            flags.append(f"--device=cuda:{index % self.workers * int(ranks[-1] if ranks else 1)}")
        return flags

    def check_ports(self) -> None:
        """Check that the requested ports are free, before anything is started. Raises LaunchError."""
        asked = {"--port": self.port, "--store-port": self.store_port}
        if self.http_port is not None:
            asked["--http"] = self.http_port
        for flag, port in asked.items():
            with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                except (OSError, OverflowError) as error:
                    why = (getattr(error, "strerror", None) or "not a port").lower()
                    raise LaunchError(
                        f"cannot listen on {self.host}:{port}: {why}; "
                        f"choose another port with {flag}, or 0 for any free one"
                    ) from error
            first = next(other for other in asked if asked[other] == port)
            if port and first != flag:
                raise LaunchError(f"{first} and {flag} are both {port}: choose two ports")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class LocalCluster:
    """Runs the cluster while the context is open. `processes` by name: valkey, store, router-1, worker-1, ..."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.processes: dict[str, Process] = {}
        self.redis_url = settings.redis_url
        self._resume_key = secrets.token_hex(32)
        # Addresses HOST:PORT, set when the context is open.
        self.store = ""
        # The store's address for operators: without credentials the same.
        self.operators = ""
        self.router = ""
        self.routers: tuple[str, ...] = ()
        self.http = ""
        # Command lines of the processes, for restarts.
        self._commands: dict[str, tuple[list[str], dict[str, str] | None]] = {}
        self._expected_to_end: set[str] = set()
        self._started_workers = 0
        self._replacing: set[asyncio.Task[str]] = set()
        self._replaced_at: list[float] = []

    async def __aenter__(self) -> LocalCluster:
        """Start, and wait until store and routers listen. Raises LaunchError after stopping everything."""
        self._failed: asyncio.Future[LaunchError] = asyncio.get_running_loop().create_future()
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="loraplex-"))
        self.data_dir = self.settings.data_dir or self._runtime_dir
        try:
            await self.unless_failed(self._start())
        except BaseException as error:
            await self._stop()
            if isinstance(error, OSError):  # The data directory is not writable.
                raise LaunchError(f"{error.filename or self.data_dir}: {error.strerror}") from error
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Drain and stop everything."""
        await self._stop()

    async def wait_serving(self, timeout_s: float = 120.0) -> None:
        """Wait until every router's health is SERVING and every worker serves. Raises LaunchError."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.unless_failed(self._serving())
        except TimeoutError as error:
            late = next((process for process in self._workers() if not process.is_ready), self.processes["router-1"])
            raise LaunchError(
                f"not serving after {timeout_s:g} s; {late.name} last said: {late.last_words()}"
            ) from error

    async def wait_failed(self) -> LaunchError:
        """Wait for an unexpected exit that no restart replaces; returns the error with process and reason."""
        return await asyncio.shield(self._failed)

    async def start_worker(self) -> str:
        """Start another worker and return its name at once. `processes[name].wait_ready()` waits until it serves."""
        self._started_workers += 1
        name = f"worker-{self._started_workers}"
        own = ["--store", self._store_of_parts, "--cache-dir", str(self.data_dir / "cache" / name)]
        await self._spawn_service(name, [*own, *self.settings.flags_of_worker(self._started_workers - 1)])
        return name

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL, *, group: bool = False) -> None:
        """Signal a process, or its whole group, on purpose: its end does not count as a failure."""
        self._expected_to_end.add(name)
        self.processes[name].send_signal(number, group=group)

    async def restart(self, name: str) -> None:
        """Restart a killed router, store or Valkey at its old address, and wait until it listens."""
        await self.processes[name].exited
        argv, environ = self._commands[name]
        if name != "valkey" and "--port" in argv:
            address = (await self.processes[name].wait_ready())[name.partition("-")[0]]
            argv[argv.index("--port") + 1] = address.rpartition(":")[2]
        self._expected_to_end.discard(name)
        await self._spawn(name, argv, environ)
        await self.unless_failed(self.processes[name].wait_ready())

    async def _start(self) -> None:
        settings = self.settings
        settings.check_ports()
        if settings.redis_url:
            await valkey.check_answers(settings.redis_url)
        for part in ("logs", "store", "cache"):
            (self.data_dir / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = [*self._listen(settings.store_port), "--data", str(self.data_dir / "store"), *settings.store_flags]
        await self._spawn_service("store", flags)
        if not settings.redis_url:
            self.redis_url = valkey.socket_url(self._runtime_dir)
            await self._spawn("valkey", valkey.command(self._runtime_dir, valkey.make_users(self._runtime_dir)))
            await self.processes["valkey"].wait_ready()
        # A chosen port is known before the store listens on it.
        self.store = self.operators = self._store_of_parts = f"{settings.host}:{settings.store_port}"
        if settings.credentials is not None:
            ready = await self.processes["store"].wait_ready()
            self.store, self.operators = ready["store"], ready["operators"]
            self._store_of_parts = ready["operators-mtls"]
        elif settings.store_port == 0:
            self.store = (await self.processes["store"].wait_ready())["store"]
            self.operators = self._store_of_parts = self.store
        names = [f"router-{number}" for number in range(1, settings.routers + 1)]
        for name in names:
            flags = [*self._listen(settings.port if name == names[0] else 0), "--store", self._store_of_parts]
            await self._spawn_service(name, [*flags, *settings.router_flags])
        for _ in range(settings.workers):
            await self.start_worker()
        await self.processes["store"].wait_ready()
        served = [await self.processes[name].wait_ready() for name in names]
        self.routers = tuple(ready["router"] for ready in served)
        self.router = self.routers[0]
        if settings.http_port is not None:
            flags = ["--router", ",".join(self.routers), "--store", self.store]
            if settings.credentials is not None:
                operated = ",".join(ready["operators"] for ready in served)
                flags += ["--operator-router", operated, "--operator-store", self.operators]
            await self._spawn_service("gateway", [*self._listen(settings.http_port), *flags])
            if settings.credentials is None or (settings.credentials / "batches.pem").exists():
                word = "router" if settings.credentials is None else "operators-mtls"
                inner = [(await self.processes[name].wait_ready())[word] for name in names]
                await self._spawn_service("runner", ["--router", ",".join(inner), "--store", self._store_of_parts])
                await self.processes["runner"].wait_ready()
            self.http = (await self.processes["gateway"].wait_ready())["gateway"]

    def _listen(self, port: int) -> list[str]:
        return ["--host", self.settings.host, "--port", str(port)]

    async def _spawn_service(self, name: str, flags: list[str]) -> None:
        """Run one of the project's own processes."""
        room = name.partition("-")[0]
        flags = [*flags, *self._credential_flags(room)]
        # Modules in the user's directory must not replace ours.
        environ = {**os.environ, "PYTHONSAFEPATH": "1"}
        # In the environment, because a URL may contain a password and every user can read command lines.
        if room in ("router", "worker"):
            own_url = self.settings.redis_url or valkey.user_url(self._runtime_dir, room)
            environ[f"LORAPLEX_{room.upper()}_REDIS_URL"] = own_url
        if room == "router":
            environ.setdefault("LORAPLEX_ROUTER_RESUME_KEY", self._resume_key)
        await self._spawn(name, [sys.executable, "-m", "loraplex", room, *flags], environ)

    def _credential_flags(self, room: str) -> list[str]:
        """Return the flags that give a process its certificate, and what else it needs with one."""
        if (directory := self.settings.credentials) is None:
            return []
        name = "batches" if room == "runner" else room
        own = ["--tls-cert", str(directory / f"{name}.pem"), "--tls-key", str(directory / f"{name}-key.pem")]
        if room == "gateway":
            return [*own, "--ca", str(directory / "ca.pem")]
        own += ["--tls-ca", str(directory / "ca.pem")]
        if room == "runner":
            return own
        if room == "store":
            first = ["--bootstrap-key", str(directory / FIRST_KEY)]
            return [*own, "--operator-port", "0", "--operator-mtls-port", "0", *first]
        operators = ["--operator-port", "0", "--operator-mtls-port", "0"] if room == "router" else []
        return [*own, "--job-key", str(directory / "job.key"), *operators]

    async def _spawn(self, name: str, argv: list[str], environ: dict[str, str] | None = None) -> None:
        log_path = self.data_dir / "logs" / f"{name}.log"
        ready = valkey.READY if name == "valkey" else READY
        self._commands[name] = (argv, environ)
        process = await Process.start(name, argv, log_path=log_path, environ=environ, ready=ready)
        self.processes[name] = process
        process.exited.add_done_callback(lambda _: self._on_exit(process))

    def _on_exit(self, process: Process) -> None:
        if process.name in self._expected_to_end:
            return
        if process.name.startswith("worker-") and process.exited.result() == 0:
            log.info("%s was drained", process.name)
            self._expected_to_end.add(process.name)
            return
        # A worker that has served is replaced, and its streams go on at another. Frequent deaths are a failure.
        if process.name.startswith("worker-") and process.is_ready and self._may_replace():
            log.warning("%s; starting another", process.failure())
            self._expected_to_end.add(process.name)
            replacing = asyncio.create_task(self.start_worker())
            self._replacing.add(replacing)
            replacing.add_done_callback(self._replacing.discard)
        elif not self._failed.done():
            self._failed.set_result(process.failure())

    def _may_replace(self) -> bool:
        now = time.monotonic()
        self._replaced_at = [at for at in self._replaced_at if now - at < 60] + [now]
        return len(self._replaced_at) <= _REPLACED_A_MINUTE

    async def unless_failed(self, work: Coroutine[None, None, T]) -> T:
        """Return the result of `work`. Raises LaunchError as soon as a process has failed."""
        try:
            return cast(T, await unless_ended(self.wait_failed(), work))
        finally:  # an exit explains more than the error of what had asked the process
            if self._failed.done():
                raise self._failed.result()

    def _workers(self) -> list[Process]:
        running = (process for name, process in self.processes.items() if name not in self._expected_to_end)
        return [process for process in running if process.name.startswith("worker-")]

    async def _serving(self) -> None:
        for process in self._workers():
            await process.wait_ready()
        for address in self.routers:
            await self._router_serving(address)

    async def _router_serving(self, address: str) -> None:
        async with self._channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    async for response in stub.Watch(health_pb2.HealthCheckRequest()):
                        if response.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.aio.AioRpcError as error:
                    # A dying router's stream breaks just before its exit is seen, and the exit explains more.
                    await asyncio.wait({self._failed}, timeout=_EXIT_S)
                    # One that was ended on purpose is started again meanwhile.
                    if self._failed.done() or error.code() is not grpc.StatusCode.UNAVAILABLE:
                        message = f"the router at {address} does not tell its health: {error.details()}"
                        raise LaunchError(message) from error

    def _channel(self, address: str) -> grpc.aio.Channel:
        if (directory := self.settings.credentials) is None:
            return grpc.aio.insecure_channel(address, options=channel_options())
        credentials = grpc.ssl_channel_credentials((directory / "ca.pem").read_bytes())
        return grpc.aio.secure_channel(address, credentials, options=channel_options())

    async def _stop(self) -> None:
        """Stop all processes in order; when cancelled meanwhile (a second Ctrl-C), kill the rest."""
        await asyncio.gather(*self._replacing, return_exceptions=True)
        self._expected_to_end.update(self.processes)
        try:
            for room, grace_s in _STOP_ORDER:
                group = [process for name, process in self.processes.items() if name.partition("-")[0] == room]
                await asyncio.gather(*(process.stop(grace_s) for process in group))
        finally:
            await asyncio.gather(*(process.kill() for process in self.processes.values()))
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
