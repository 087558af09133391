"""Runs an operator between an API server of Kubernetes and a store, both of which tell their calls."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from loraplex.adapters.v1 import releases_pb2

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.access import GuardedServers
from tests.adapter_store.conftest import Client, files_of
from tests.adapter_store.releases.test_releases import Releasing
from tests.clients.operator.kubernetes_api import KubernetesApi, Object

# Seconds between looks, so that no test waits for one.
LOOK_S = 0.05
States = releases_pb2.ReleaseState


class Tap(grpc.aio.ServerInterceptor):
    """Awaits `on_call` before and after each call that has one request."""

    def __init__(self, on_call: Callable[[str], Awaitable[None]]) -> None:
        self._on_call = on_call

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler, method = await continuation(details), details.method.rpartition("/")[2]
        if handler is None or handler.request_streaming:
            return handler

        @asynccontextmanager
        async def told() -> AsyncIterator[None]:
            await self._on_call(method)
            try:
                yield
            finally:
                await self._on_call(f"after {method}")

        async def answered(request: Any, context: Any) -> Any:
            async with told():
                return await handler.unary_unary(request, context)

        async def streamed(request: Any, context: Any) -> AsyncIterator[Any]:
            async with told():
                async for answer in handler.unary_stream(request, context):
                    yield answer

        messages = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(streamed, *messages)
        return grpc.unary_unary_rpc_method_handler(answered, *messages)


class TappedStore(Store):
    """A store whose calls are told."""

    def __init__(self, settings: StoreSettings, on_call: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(settings)
        self._tap = Tap(on_call)

    def _servers(self) -> GuardedServers:
        def tapped(*arguments: Any, interceptors: list[grpc.aio.ServerInterceptor], **options: Any) -> Server:
            return Server(*arguments, interceptors=[*interceptors, self._tap], **options)

        with patch("loraplex.adapter_store.app.Server", tapped):
            return super()._servers()


class World:
    """An API server, a store with the base model `base`, and the process of an operator between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kube = KubernetesApi()
        self.on_call: Callable[[str], None] = lambda call: None
        # The call that does not go on, and what is set once it has come.
        self.hold, self.held = "", asyncio.Event()
        self.kube.on_call = self._call
        self._process: asyncio.subprocess.Process | None = None

    async def _call(self, call: str) -> None:
        self.on_call(call)
        if call == self.hold:
            self.hold = ""
            self.held.set()
            await asyncio.Event().wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        """Run all but the operator; end what runs."""
        sources = self.folder / "sources.toml"
        sources.write_text(f'[[source]]\nprefix = "file://{self.folder / "sources"}"\ntenants = ["acme"]\n')
        settings = StoreSettings(data=self.folder / "data", port=0, sources=str(sources))
        self.store = TappedStore(settings, self._call)
        await self.store.start()
        self.client = Client(f"127.0.0.1:{self.store.port}")
        await self.client.register(read_base_model("hash:?vocab=600", name="base"))
        try:
            async with self.kube, grpc.aio.insecure_channel(f"127.0.0.1:{self.store.port}") as channel:
                self.releasing = Releasing(channel)
                yield self
                await self.stop()
        finally:
            self.kill()
            await self.client.close()
            await self.store.stop(drain_s=0)

    def source(self, name: str, seed: int) -> str:
        """Make an adapter that the store may import; return its URI."""
        folder = self.folder / "sources" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files_of(seed).items():
            (folder / file).write_bytes(content)
        return f"file://{folder}"

    async def start(self) -> None:
        """Start the operator, and wait until it follows its namespaces: llm with any tenant, team with beta's."""
        config = self.kube.write_kubeconfig(self.folder / "kubeconfig")
        command = [sys.executable, "-m", "loraplex.operator", "--namespaces=llm,team=beta", f"--look-s={LOOK_S}"]
        with (self.folder / "operator.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                f"--store=127.0.0.1:{self.store.port}",
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "KUBECONFIG": str(config)},
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            line = await self._process.stdout.readline()
        assert line.startswith(b"ready operator=llm,team metrics="), self.log

    def kill(self) -> None:
        """End the operator with SIGKILL, if it runs."""
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for the end of the operator; return its exit code."""
        assert self._process is not None
        async with asyncio.timeout(60):
            return await self._process.wait()

    async def stop(self) -> None:
        """Stop the operator, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            assert await self.ended() == 0, self.log

    @property
    def log(self) -> str:
        """Return what the operators have logged."""
        return (self.folder / "operator.log").read_text()

    def status(self, name: str, plural: str = "loraadapters", namespace: str = "llm") -> Object:
        """Return an object's status."""
        found: Object = (self.kube.get(name, plural, namespace) or {}).get("status", {})
        return found

    def ready(self, name: str, plural: str = "loraadapters", namespace: str = "llm") -> tuple[str, str, str]:
        """Return state, reason and message of an object."""
        status = self.status(name, plural, namespace)
        conditions: list[Object] = status.get("conditions", [])
        ready: Object = next((one for one in conditions if one["type"] == "Ready"), {})
        return status.get("state", ""), ready.get("reason", ""), ready.get("message", "")

    async def until(self, name: str, reason: str, plural: str = "loraadapters", namespace: str = "llm") -> str:
        """Wait for a reason of an object's present spec; return the message."""

        def reached() -> bool:
            found = self.kube.get(name, plural, namespace)
            seen = self.status(name, plural, namespace).get("observedGeneration")
            return found is not None and (self.ready(name, plural, namespace)[1], seen) == (
                reason,
                found["metadata"]["generation"],
            )

        await self.kube.until(reached, f"{name} is not {reason}")
        return self.ready(name, plural, namespace)[2]

    async def told(self, name: str, *reasons: str) -> None:
        """Wait until an object has these events and no others; they come after its status."""
        await self.kube.until(lambda: self.kube.events(name) == list(reasons), f"{name}: {self.kube.events(name)}")

    async def gone(self, name: str, namespace: str = "llm") -> None:
        """Wait until a LoraAdapter is gone."""
        await self.kube.until(lambda: self.kube.get(name, namespace=namespace) is None, f"{name} is still there")

    async def live(self, adapter: str, tenant: str = "acme") -> Any:
        """Return the live revision of an adapter; None where the store has no such adapter."""
        try:
            return (await self.client.get(adapter, tenant)).revision
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return None

    async def releases(self, adapter: str) -> list[tuple[str, str]]:
        """Return source and state of an adapter's releases, oldest first."""
        answer = await self.releasing.ask("ListReleases", parent=f"tenants/acme/adapters/{adapter}")
        return [
            (one.origin.source, States.Name(one.state).removeprefix("RELEASE_STATE_"))
            for one in reversed(answer.releases)
        ]
