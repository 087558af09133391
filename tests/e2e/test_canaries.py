"""A cluster with credentials that is told secrets: they are in nothing that it writes, whatever goes wrong meanwhile.

The secrets are a prompt, an answer, a chat template and API keys. What is read: logs at their lowest level with the
dump of a crash, metrics pages, traces, usage events and what their collector gets, audit logs, and all of Redis while a
job waits and afterwards, with a dead letter.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import struct
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from redis.asyncio import Redis

from loraplex.admin.v1 import keys_pb2, keys_pb2_grpc, tenants_pb2, tenants_pb2_grpc
from loraplex.cli.audit_chain import read, verify
from loraplex.cli.development_ca import DevelopmentCa, write_private
from loraplex.cli.models import registered
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.broker.job_keys import new_job_key
from loraplex.runtime.rpc.children.process import Process
from loraplex.runtime.tenancy.api_keys import new_api_key
from loraplex_client import AsyncClient, AsyncStoreClient, InternalError, Tls, UnauthenticatedError, UnavailableError
from loraplex_client.errors import InvalidRequestError
from tests.e2e.test_telemetry import collector
from tests.router.usage_events.test_sender import Collector
from tests.valkey_server import ValkeyServer

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

PROMPT, ANSWER, TEMPLATE = "Zq7promptVx3kW9pJ", "Zq7answerLm4tR8sH", "Zq7templateBn5yD2fG"
ADAPTER = "zq7adapter"
# The end of a key that is refused.
PASSWORD = "Zq7wrong"
MODEL = "hash:?vocab=600&step_ms=1&die_on=1"
JOB = ":job:"


@dataclass
class Secure:
    """A cluster with credentials; what it writes is in `directory`."""

    directory: Path
    ca: DevelopmentCa
    valkey: ValkeyServer
    processes: dict[str, Process] = field(default_factory=dict)
    argv: dict[str, list[str]] = field(default_factory=dict)
    ready: dict[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def tls(self) -> Tls:
        """Return the certificate authority that clients trust."""
        return Tls(ca=self.directory / "ca.pem")

    async def start(self, name: str, *flags: str) -> None:
        """Start a process that logs everything; without flags one that was killed, again."""
        if flags:
            cert, key = self.ca.write(self.directory, name, self.ca.issue(f"loraplex://{name}/{name}", ["127.0.0.1"]))
            tls = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(self.directory / "ca.pem")]
            self.argv[name] = [sys.executable, "-m", "loraplex", name, "--log-level", "debug", *tls, *flags]
        log_path = self.directory / f"{name}.log"
        environ = {**os.environ, "GRPC_VERBOSITY": "ERROR", "PYTHONFAULTHANDLER": "1"}
        self.processes[name] = await Process.start(name, self.argv[name], log_path=log_path, environ=environ)
        if name != "worker":
            self.ready[name] = await self.processes[name].started()

    async def stop(self) -> None:
        """End all, those first that the others do not need."""
        for name in ("router", "worker", "store"):
            if name in self.processes:
                await self.processes[name].stop(10.0)


@asynccontextmanager
async def secure_cluster(directory: Path, usage_url: str) -> AsyncIterator[tuple[Secure, str, str]]:
    """Run a cluster; yields it with the key of an operator and the key of acme's admin."""
    ca, first = DevelopmentCa(), new_api_key()[1]
    ca.write_ca(directory)
    write_private(directory / "operator.key", first.encode())
    write_private(directory / "job.key", new_job_key().encode())
    cluster = Secure(directory, ca, ValkeyServer(directory / "v"))
    async with AsyncExitStack() as stack:
        await cluster.valkey.start()
        stack.push_async_callback(cluster.valkey.kill)
        stack.push_async_callback(cluster.stop)
        ports = ["--port", "0", "--operator-port", "0", "--operator-mtls-port", "0"]
        flags = ["--data", str(directory / "data"), "--bootstrap-key", str(directory / "operator.key")]
        await cluster.start("store", *ports, *flags, "--audit", str(directory / "store.audit"))
        inner = ["--store", cluster.ready["store"]["operators-mtls"], "--redis-url", cluster.valkey.url]
        inner += ["--job-key", str(directory / "job.key")]
        usage = ["--usage-file", str(directory / "usage.jsonl"), "--usage-url", usage_url]
        audit = ["--audit", str(directory / "router.audit")]
        await cluster.start("router", *ports, *inner, *usage, *audit, "--drain-s", "0.1")
        flags = ["--cache-dir", str(directory / "cache"), "--audit", str(directory / "worker.audit")]
        await cluster.start("worker", "--model", MODEL, *inner, *flags)
        base = await asyncio.to_thread(read_base_model, MODEL)
        async with AsyncStoreClient(cluster.ready["store"]["operators"], api_key=first, tls=cluster.tls) as operator:
            await operator.register_model(registered(base), base.files)
        yield cluster, first, await make_key(cluster, first)


async def make_key(cluster: Secure, first: str) -> str:
    """Make the key of acme's admin."""
    credentials = grpc.ssl_channel_credentials(cluster.ca.pem)
    async with grpc.aio.secure_channel(cluster.ready["store"]["operators"], credentials) as channel:
        stub: Any = keys_pb2_grpc.KeyServiceStub(channel)
        request = keys_pb2.CreateKeyRequest(tenant="acme", role="tenant-admin")
        made = await stub.CreateKey(request, metadata=(("authorization", f"Bearer {first}"),))
        return str(made.api_key)


def write_adapter(directory: Path) -> Path:
    """Write an adapter whose chat template is a secret."""
    directory.mkdir()
    chat = {"template": TEMPLATE + "{% for m in messages %}{{ m.content }}{% endfor %}"}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "loraplex_chat": chat}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


def encodings(secret: str) -> dict[str, bytes]:
    """Return what a secret, or the ids of its bytes, may look like."""
    text = secret.encode()
    found = {
        "text": text,
        "hex": text.hex().encode(),
        "ids as JSON": b", ".join(b"%d" % byte for byte in text),
        "ids as compact JSON": b",".join(b"%d" % byte for byte in text),
        "ids of 4 bytes": struct.pack(f"<{len(text)}I", *text),
        "ids of 8 bytes": struct.pack(f"<{len(text)}Q", *text),
        "ids of 2 bytes": struct.pack(f"<{len(text)}H", *text),
    }
    for shift in range(3):  # the whole groups of three bytes, wherever it begins
        encoded = base64.b64encode(b"\0" * shift + text).rstrip(b"=")
        found[f"base64 after {shift}"] = encoded[4 if shift else 0 : -1]
    return found


def leaks(written: Mapping[str, bytes], secrets: Iterable[str]) -> list[str]:
    """Return where which secret is in clear."""
    return [
        f"{secret} as {how} in {where}"
        for secret in secrets
        for how, code in encodings(secret).items()
        for where, data in written.items()
        if code in data
    ]


async def everything_in(redis: Redis) -> dict[str, bytes]:
    """Return all that Redis has, as it keeps it and as it reads."""
    found: dict[str, bytes] = {}
    async for key in redis.scan_iter():
        kind = await redis.type(key)
        values: dict[object, Any] = {
            b"string": redis.get,
            b"hash": redis.hgetall,
            b"set": redis.smembers,
            b"list": lambda name: redis.lrange(name, 0, -1),
            b"zset": lambda name: redis.zrange(name, 0, -1),
        }
        if kind not in values:  # it has expired or ended since
            continue
        parts = list(flat(await values[kind](key)))
        found[f"redis {key!r}"] = b"\n".join([key, *parts, await redis.dump(key) or b""])
    return found


def flat(value: Any) -> Iterable[bytes]:
    """Yield the byte strings in a value of Redis."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from (*flat(name), *flat(one))
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from flat(one)


def files_in(directory: Path) -> dict[str, bytes]:
    """Return what the cluster has written, without adapters and the tests' own credentials."""
    kept = {"data", "cache", "v", "mine"}
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.relative_to(directory).parts[0] not in kept and path.suffix not in {".pem", ".key"}
    }


async def metrics_of(cluster: Secure) -> dict[str, bytes]:
    """Return the metrics pages."""
    addresses = {name: ready["metrics"] for name, ready in cluster.ready.items()}
    addresses["worker"] = (await cluster.processes["worker"].started())["metrics"]

    def fetch(address: str) -> bytes:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return bytes(answer.read())

    return {f"metrics of {name}": await asyncio.to_thread(fetch, address) for name, address in addresses.items()}


async def serving(client: AsyncClient) -> bool:
    """Tell whether the cluster answers."""
    try:
        await client.generate("hello", max_tokens=1)
    except (UnavailableError, UnauthenticatedError):  # the router looks for new keys twice a second
        return False
    return True


async def refused(call: Awaitable[object], *errors: type[Exception]) -> None:
    """Make a call that ends with an error."""
    with pytest.raises(errors):
        await call


async def test_no_secret_is_in_anything_that_a_cluster_writes(
    tmp_path_factory: pytest.TempPathFactory, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("c")
    (directory / "mine").mkdir()
    takes = Collector()
    takes.start()
    bodies: list[bytes] = []
    async with collector() as (traces, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        async with secure_cluster(directory, takes.url) as (cluster, first, key):
            async with AsyncStoreClient(cluster.ready["store"]["store"], api_key=key, tls=cluster.tls) as store:
                await store.push(write_adapter(directory / "mine" / "a"), ADAPTER)
            waiting = await tell(cluster, key, eventually)
            async with await cluster.valkey.client() as redis:

                async def has_a_dead_letter() -> bool:
                    return bool(await redis.keys("*:dead"))

                await eventually(has_a_dead_letter)
                written = {**await everything_in(redis), **waiting, **await metrics_of(cluster)}
                await use_again(cluster, key, eventually)
                await check_purge(cluster, first, redis)
        written |= files_in(directory)
        spans = [span for found in traces.spans.values() for _, span in found]
        assert len(spans) > 10
        bodies += [span.SerializeToString() for span in spans]
    takes.stop()
    written |= {"traces": b"\n".join(bodies), "the collector's events": takes.bodies}
    assert {"store.log", "router.log", "worker.log", "usage.jsonl", "store.audit", "router.audit"} <= written.keys()
    assert any(JOB in where for where in waiting), "no job waited"
    assert any(":dead" in where for where in written), "there is no dead letter"
    assert b"Fatal Python error: Aborted" in written["router.log"], "there is no dump of a crash"
    keys = [text.split("_", 2)[2] for text in (first, key)]
    found = leaks(written, [PROMPT, ANSWER, TEMPLATE, *keys, PASSWORD])
    assert found == []
    named = {where for where, data in written.items() if ADAPTER.encode() in data}
    assert {"usage.jsonl", "store.audit"} <= named, "the search finds what is there"
    for log in ("store.audit", "router.audit", "worker.audit"):
        assert verify(read([directory / log])).faults == []
    check_usage(directory, takes)


async def operate(cluster: Secure, first: str, server: str, stub: Any, method: str, request: Any) -> Any:
    """Call a method at the operators' port of a server, for tenant acme."""
    credentials = grpc.ssl_channel_credentials(cluster.ca.pem)
    metadata = (("authorization", f"Bearer {first}"), ("x-loraplex-tenant", "acme"))
    async with grpc.aio.secure_channel(cluster.ready[server]["operators"], credentials) as channel:
        return await getattr(stub(channel), method)(request, metadata=metadata)


async def use_again(cluster: Secure, key: str, eventually: Eventually) -> None:
    """Fill the caches of the router, and of the worker, whose engine has died."""
    async with AsyncClient(cluster.ready["router"]["router"], api_key=key, tls=cluster.tls) as client:

        async def answers() -> bool:
            try:
                await client.chat([{"role": "user", "content": PROMPT}], adapter_id=ADAPTER, max_tokens=4)
            except UnavailableError:
                return False
            return True

        await eventually(answers)
        await client.generate(PROMPT, adapter_id=ADAPTER, choices=[ANSWER])


async def check_purge(cluster: Secure, first: str, redis: Redis) -> None:
    """Purge acme from store and cell: what is left of it are the accounts that are kept, and logs."""
    cell, revisions = (cluster, first, "router", cluster_pb2_grpc.ClusterServiceStub), cluster.directory / "cache"
    await operate(*cell, "PinAdapter", cluster_pb2.PinAdapterRequest(adapter=ADAPTER))
    assert list(revisions.glob("sha256-*")), "the worker has the adapter on its disk"
    request = tenants_pb2.PurgeTenantRequest(tenant="acme")
    purged = await operate(cluster, first, "store", tenants_pb2_grpc.TenantServiceStub, "PurgeTenant", request)
    assert not purged.left
    answer = await operate(*cell, "PurgeTenant", cluster_pb2.PurgeTenantRequest(tenant="acme"))
    assert [place for place in answer.places if place.left or place.error] == []
    assert (answer.left_count, answer.error_count) == (0, 0)
    removed = {place.place for place in answer.places if place.removed}
    assert {"pins", "records by name", "settings of adapters", "adapters on disk", "KV blocks"} <= removed, answer
    assert {"adapters in memory and slots", "compiled formats", "templates and formats"} <= removed, answer
    assert list(revisions.glob("*-*")) == []
    named = {where for where, data in (await everything_in(redis)).items() if b"acme" in data}
    # A charge of a claimed job is dropped within minutes, as a reservation that has ended; an account with its month.
    # A report of its last answer that comes after the purge leaves a counter until the others have passed it.
    accounts = ("{ledger}:account:acme", "{ledger}:account:tenants/acme/")
    kept = [":charged", ":idle", *accounts, "{ledger}:of:", "{ledger}:usage"]
    assert [where for where in named if not any(one in where for one in kept)] == []


def check_usage(directory: Path, takes: Collector) -> None:
    """The collector has the events of the file, of a router that was killed and its successor."""
    events = {event["id"]: event for event in map(json.loads, (directory / "usage.jsonl").read_text().splitlines())}
    assert set(takes.ids) == set(events)
    whole = [event["data"]["request_id"] for event in events.values()]
    assert {"one", "two", "three"} <= set(whole)
    assert len(whole) == len(set(whole))


async def tell(cluster: Secure, key: str, eventually: Eventually) -> dict[str, bytes]:
    """Tell the cluster all secrets, while things break; return what Redis has while a job waits."""
    address, waiting = cluster.ready["router"]["router"], dict[str, bytes]()
    async with (
        AsyncClient(address, api_key=key, tls=cluster.tls) as client,
        AsyncClient(address, api_key=key[:-9] + PASSWORD + "x", tls=cluster.tls) as stranger,
    ):
        await eventually(lambda: serving(client))
        answer = await client.generate(PROMPT, adapter_id=ADAPTER, choices=[ANSWER], echo=True, request_id="one")
        assert ANSWER in answer.text
        chat = [{"role": "user", "content": PROMPT}]
        await client.chat(chat, adapter_id=ADAPTER, max_tokens=4, request_id="two")
        await refused(client.generate(PROMPT, regex=f"({ANSWER}", max_tokens=4), InvalidRequestError)
        await refused(stranger.generate(PROMPT), UnauthenticatedError)
        cluster.processes["worker"].send_signal(signal.SIGSTOP)
        late = asyncio.create_task(client.generate(PROMPT, max_tokens=4, adapter_id=ADAPTER, request_id="three"))
        async with await cluster.valkey.client() as redis:

            async def waits() -> bool:
                waiting.update(await everything_in(redis))
                return any(JOB in where for where in waiting)

            await eventually(waits)
            cluster.processes["router"].send_signal(signal.SIGABRT)
            await cluster.processes["router"].exited
            cluster.processes["worker"].send_signal(signal.SIGCONT)
            argv = cluster.argv["router"]
            argv[argv.index("--port") + 1] = address.rpartition(":")[2]
            await cluster.start("router")
            await asyncio.wait({late})
            if late.exception() is not None:
                await eventually(lambda: serving(client))
                await client.generate(PROMPT, max_tokens=4, adapter_id=ADAPTER, request_id="three")
        deadly = [1, *PROMPT.encode()]
        await refused(client.generate(token_ids=deadly, max_tokens=4, request_id="deadly"), InternalError)
    return {f"{where} while a job waits": data for where, data in waiting.items()}


def test_ids_of_a_prompt_are_found_in_what_has_them() -> None:
    ids = PROMPT.encode()
    for written in (msgspec.msgpack.encode(list(ids)), json.dumps(list(ids)).encode(), repr(list(ids)).encode()):
        assert leaks({"here": b"x" + written}, [PROMPT]), written
    for before in range(3):
        assert leaks({"here": base64.b64encode(b"x" * before + ids + b"yy")}, [PROMPT])
    assert not leaks({"here": b"another"}, [PROMPT])
