"""The adapter store: `python -m bench.store [--quick] [--json FILE]`: imports of a large adapter, and a large catalog.

An adapter of 200 MB is imported from a hub over loopback and from a folder, by a store process of its own. Right before
it the same bytes come over the same loopback into nothing, and go from the disk into a hash and a synced file: an
import, which must do both, is compared with the slower of these. A catalog of 100,000 adapters is listed and started
with, in a directory; a router's client resolves names from its cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from bench.command import run_command
from bench.report import Aim, Report, progress
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.router.catalog.store_client import StoreClient
from loraplex_client import AsyncStoreClient
from loraplex_client.resources import BaseModel

AIMS = {
    "hub_of_slower_limit": Aim(at_least=0.5),
    "folder_of_disk": Aim(at_least=0.5),
    "memory_growth_mb": Aim(at_most=64),
    "list_page_ms": Aim(at_most=100),
    "resolve_cached_us": Aim(at_most=50),
    "start_s": Aim(at_most=10),
}
_MB = 1e6
_COMMIT = "0" * 40
# Digest of what the catalog's adapters have as files, which nobody reads.
_NOTHING = "sha256:" + "0" * 64


@dataclass(frozen=True)
class Setup:
    """The sizes of a run."""

    weight_mb: int = 200
    adapters: int = 100_000
    repeats: int = 5


def measure(quick: bool) -> Report:
    """Run both measurements."""
    setup = Setup(weight_mb=20, adapters=2_000, repeats=1) if quick else Setup()
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-") as directory:
        imports = asyncio.run(_measure_imports(Path(directory), setup))
        catalog = asyncio.run(_measure_catalog(Path(directory), setup))
    ratios = {
        "hub_of_slower_limit": imports["hub_ratio"],
        "folder_of_disk": imports["folder_ratio"],
        "memory_growth_mb": imports["growth"],
        **catalog,
    }
    rows = [
        {"bytes of": "the loopback alone", "MB/s": imports["loopback"]},
        {"bytes of": "an import from a hub", "MB/s": imports["hub"]},
        {"bytes of": "the disk alone", "MB/s": imports["disk"]},
        {"bytes of": "an import from a folder", "MB/s": imports["folder"]},
    ]
    return Report("store", "python -m bench.store", quick, vars(setup), rows, ratios, AIMS)


async def _measure_imports(directory: Path, setup: Setup) -> dict[str, float]:
    folder = directory / "models" / "support"
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_bytes(b'{"peft_type": "LORA", "r": 8}')
    speeds: dict[str, list[float]] = {name: [] for name in ("loopback", "hub", "disk", "folder", "growth")}
    ratios: dict[str, list[float]] = {"hub_ratio": [], "folder_ratio": []}
    async with _hub(folder) as url:
        sources = directory / "sources.toml"
        rules = (
            f'prefix = "hf://acme"\nendpoint = "{url}"\nallow_private = true\n',
            f'prefix = "file://{folder.parent}"\n',
        )
        sources.write_text("".join(f"[[source]]\n{rule}" for rule in rules))
        for repeat in range(setup.repeats):
            progress(f"imports of {setup.weight_mb} MB, {repeat + 1} of {setup.repeats}")
            with (folder / WEIGHTS_FILE).open("wb") as file:
                for _ in range(setup.weight_mb):
                    file.write(os.urandom(1_000_000))
            store = running_store(directory / f"data{repeat}", "--sources", str(sources))
            async with store as (process, address, _), AsyncStoreClient(address, "acme") as client:
                await _register(client)
                before = _peak_mb(process.pid)
                for name, source in (("hub", "hf://acme/support"), ("folder", f"file://{folder}")):
                    read = setup.weight_mb / await asyncio.to_thread(_read, f"{url}/file/{WEIGHTS_FILE}")
                    copied = setup.weight_mb / await asyncio.to_thread(_copy, folder / WEIGHTS_FILE, directory)
                    start = time.perf_counter()
                    await client.import_revision(source, name)
                    speed = setup.weight_mb / (time.perf_counter() - start)
                    for what, value in (("loopback", read), ("disk", copied), (name, speed)):
                        speeds[what].append(value)
                    ratios[f"{name}_ratio"].append(speed / (min(read, copied) if name == "hub" else copied))
                speeds["growth"].append(_peak_mb(process.pid) - before)
    return {name: median(values) for name, values in {**speeds, **ratios}.items()}


async def _measure_catalog(directory: Path, setup: Setup) -> dict[str, float]:
    data = directory / "large"
    async with running_store(data) as (_, address, _), AsyncStoreClient(address, "acme") as client:
        await _register(client)
    progress(f"a catalog of {setup.adapters} adapters")
    with closing(EmbeddedDatabase(data / "catalog.db")) as database:
        _fill(database, setup.adapters)
    (data / "blobs" / _NOTHING.removeprefix("sha256:")).write_bytes(b"")
    async with running_store(data) as (_, address, start_s), AsyncStoreClient(address, "acme") as client:
        pages = [await _page_ms(address) for _ in range(20)]
        router = StoreClient(address)
        await router.resolve("acme", "adapter-00000777")
        looks = 0
        began = time.perf_counter()
        while (took := time.perf_counter() - began) < 0.5:  # a cached name is good for a second
            await router.resolve("acme", "adapter-00000777")
            looks += 1
        await router.close()
        assert len(await client.list()) == setup.adapters
    return {"list_page_ms": median(pages), "resolve_cached_us": took / looks * 1e6, "start_s": start_s}


async def _page_ms(address: str) -> float:
    """Return the milliseconds of a page of 1,000 adapters from the middle of the catalog."""
    import grpc
    from loraplex.adapters.v1 import adapters_pb2 as pb
    from loraplex.adapters.v1 import adapters_pb2_grpc

    from loraplex.adapter_store.convert import encode_token

    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        stub: Any = adapters_pb2_grpc.AdapterServiceStub(channel)
        request = pb.ListAdaptersRequest(page_size=1000, page_token=encode_token(("acme", "adapter-00000500")))
        start = time.perf_counter()
        page = await stub.ListAdapters(request, metadata=(("x-loraplex-tenant", "acme"),))
        took = time.perf_counter() - start
    assert len(page.adapters) == 1000
    return took * 1e3


def _fill(database: Database, count: int) -> None:
    """Put adapters with one revision each into the catalog."""
    with database.transaction() as rows:
        base = rows.execute("SELECT digest FROM base_models").fetchone()[0]
        for at in range(count):
            digest = f"sha256:{hashlib.sha256(str(at).encode()).hexdigest()}"
            rows.execute("INSERT INTO adapters VALUES (?, 'acme', ?, 'hash', 1, 1, 1)", (at + 1, f"adapter-{at:08d}"))
            rows.execute(
                "INSERT INTO revisions (number, adapter_id, digest, base_digest, rank, config_digest, config_bytes, "
                "weights_digest, weights_bytes, create_ns) VALUES (?, ?, ?, ?, 8, ?, 0, ?, 0, 1)",
                (at + 1, at + 1, digest, base, _NOTHING, _NOTHING),
            )
            rows.execute("INSERT INTO aliases VALUES (?, 'live', ?)", (at + 1, digest))


async def _register(client: AsyncStoreClient) -> None:
    base = read_base_model("hash:?vocab=600")
    model = BaseModel(
        base.name, base.digest, base.architecture, base.context_length, base.vocab_size, base.end_token_ids, ()
    )
    await client.register_model(model, {})


def _read(url: str) -> float:
    """Return the seconds for reading a file over HTTP into nothing."""
    start = time.perf_counter()
    with httpx2.stream("GET", url) as response:
        for _ in response.iter_raw():
            pass
    return time.perf_counter() - start


def _copy(file: Path, directory: Path) -> float:
    """Return the seconds for reading a file, hashing it, and writing a synced copy."""
    start, sha256 = time.perf_counter(), hashlib.sha256()
    with file.open("rb") as source, tempfile.NamedTemporaryFile(dir=directory) as copy:
        while piece := source.read(1 << 20):
            sha256.update(piece)
            copy.write(piece)
        copy.flush()
        os.fsync(copy.fileno())
    return time.perf_counter() - start


def _peak_mb(pid: int) -> float:
    """Return the largest resident set of a process, in MB."""
    matched = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert matched is not None
    return int(matched[1]) * 1024 / _MB


@asynccontextmanager
async def running_store(data: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, float]]:
    """Run a store process; yields it, its address, and the seconds of its start."""
    start = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loraplex.adapter_store", "--data", str(data), "--port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    took = time.perf_counter() - start
    try:
        yield process, line.split()[1].removeprefix("store="), took
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _hub(folder: Path) -> AsyncIterator[str]:
    """Run a hub that has a folder as acme/support, in a process of its own; yields its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.store", "--hub", str(folder)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


def _serve_hub(folder: Path) -> None:
    """Serve the description and the files of a repository, until the process ends."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path.startswith("/api/"):
                files = [{"rfilename": each.name, "size": each.stat().st_size} for each in folder.iterdir()]
                self._send(json.dumps({"id": "acme/support", "sha": _COMMIT, "siblings": files}).encode())
                return
            with (folder / self.path.rpartition("/")[2]).open("rb") as file:
                self.send_response(200)
                self.send_header("content-length", str(os.fstat(file.fileno()).st_size))
                self.end_headers()
                self.wfile.flush()
                self.connection.sendfile(file)

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hub"]:
        _serve_hub(Path(sys.argv[2]))
    else:
        run_command("store", __doc__ or "", measure)
