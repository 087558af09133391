"""A real store on a port of its own, and a client that speaks its protocol. Imported by tests for their types alone."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.status_pb2 import Status
from loraplex.adapters.v1 import adapters_pb2 as pb
from loraplex.adapters.v1 import adapters_pb2_grpc as pb_grpc
from safetensors.numpy import save

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.database import Database
from loraplex.adapter_store.embedded import open_database
from loraplex.contracts.artifacts.base_model import BaseModel, ModuleShape, read_base_model
from loraplex.runtime.rpc.server import channel_options
from tests.adapter_store.sources.places import seaweed
from tests.postgres_server import PostgresServer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"


class Client:
    """The store's methods as one tenant or another calls them."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        self.stub: Any = pb_grpc.AdapterServiceStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def call(self, method: str, request: Any, tenant: str | None = "acme") -> Any:
        """A unary method's answer."""
        return await getattr(self.stub, method)(request, metadata=metadata(tenant))

    async def register(self, base: BaseModel, replace: bool = False, stage: bool = False) -> Any:
        """Register a base model with its files."""
        model = pb.BaseModel(
            name=base.name,
            digest=base.digest,
            architecture=base.architecture,
            context_length=base.context_length,
            vocab_size=base.vocab_size,
            end_token_ids=base.end_token_ids,
            modules=[
                pb.Module(name=m.name, in_features=m.in_features, out_features=m.out_features, experts=m.experts)
                for m in base.modules
            ],
            tasks=base.tasks,
            labels=base.labels,
            pooling=base.pooling,
            quantization=base.quantization,
            original_digest=base.original_digest,
            kv_cache_dtype=base.kv_cache_dtype,
            generation_config=pb.GenerationConfig(**base.generation_config.given),
        )
        parts = [pb.RegisterBaseModelRequest(model=model, replace=replace, stage=stage)]
        parts += [pb.RegisterBaseModelRequest(chunk=part) for part in chunks(base.files)]
        return (await self.stub.RegisterBaseModel(iter(parts))).model

    async def upload(self, adapter: str, files: Mapping[str, bytes], tenant: str = "acme", **header: Any) -> Any:
        """Upload a revision."""
        parts = [pb.UploadRevisionRequest(header=pb.UploadHeader(adapter=adapter, **header))]
        parts += [pb.UploadRevisionRequest(chunk=part) for part in chunks(files)]
        return await self.stub.UploadRevision(iter(parts), metadata=metadata(tenant))

    async def download(self, name: str, tenant: str = "acme") -> tuple[Any, dict[str, bytes]]:
        """A revision's description and files."""
        first, files = None, dict[str, bytes]()
        async for part in self.stub.DownloadRevision(pb.DownloadRevisionRequest(name=name), metadata=metadata(tenant)):
            if part.WhichOneof("part") == "revision":
                first = part.revision
            else:
                files[part.chunk.name] = files.get(part.chunk.name, b"") + part.chunk.data
        return first, files

    async def get(self, name: str, tenant: str = "acme") -> Any:
        """Return the revision or set that the name means."""
        return await self.call("GetAdapter", pb.GetAdapterRequest(name=name), tenant)


def metadata(tenant: str | None) -> tuple[tuple[str, str], ...]:
    """A call's metadata."""
    return () if tenant is None else (("x-loraplex-tenant", tenant),)


def chunks(files: Mapping[str, bytes]) -> list[pb.FileChunk]:
    """Files as chunks that do not divide them evenly."""
    size = 1_000_000
    return [
        pb.FileChunk(name=name, data=data[start : start + size])
        for name, data in files.items()
        for start in range(0, max(1, len(data)), size)
    ]


def files_of(seed: int = 0, **config: Any) -> dict[str, bytes]:
    """A small adapter of the tiny base model: rank 2 on q_proj."""
    rng = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.{Q_PROJ}.lora_A.weight": rng.standard_normal((2, 8)).astype(np.float32),
        f"base_model.model.{Q_PROJ}.lora_B.weight": rng.standard_normal((6, 2)).astype(np.float32),
    }
    return {CONFIG: json.dumps({"peft_type": "LORA", "r": 2, **config}).encode(), WEIGHTS: save(tensors)}


def refusal_of(error: grpc.aio.AioRpcError) -> tuple[str, str, bytes]:
    """The status's code, its details' types, and its bytes as they came."""
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    status = Status.FromString(raw)
    kinds = ",".join(detail.type_url.rpartition(".")[2] for detail in status.details)
    assert status.message == error.details()
    return error.code().name, kinds, raw


@pytest.fixture(scope="session")
def seaweed_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an object store, SeaweedFS; it has the bucket `acme`."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as url:
        yield url


@pytest.fixture
def hash_base() -> BaseModel:
    """A base that takes any adapter bytes."""
    return read_base_model("hash:?vocab=600")


@pytest.fixture
def tiny_base() -> BaseModel:
    """A base with one layer that adapters may change, and two small files."""
    return BaseModel(
        name="tiny",
        digest="sha256:" + "1" * 64,
        architecture="llama",
        context_length=64,
        vocab_size=32,
        end_token_ids=(2,),
        modules=(ModuleShape(Q_PROJ, in_features=8, out_features=6),),
        files={"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}" * 700_000, "empty.json": b""},
    )


@pytest.fixture
def adapter_files() -> Callable[..., dict[str, bytes]]:
    """`adapter_files(seed, **config)`: a small adapter of the tiny base model."""
    return files_of


@pytest.fixture
def refusal() -> Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]:
    """`refusal(error)`: code, kinds of details, bytes of the status."""
    return refusal_of


@pytest.fixture
def connect() -> Callable[[str], Client]:
    """`connect(address)`: a client of another store; the caller closes it."""
    return Client


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The store's directory."""
    return tmp_path / "data"


# Files whose tests run on each database, but for those that look into the directory.
_ON_EACH = {"accounts", "adapters", "api_keys", "bases", "batches", "certificates", "expiry"}
_ON_EACH |= {"find_revisions", "grants", "lists", "plans", "purge", "releases"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of the catalog on SQLite and on PostgreSQL; those of what is refused come to neither."""
    looks = "data" in inspect.signature(metafunc.function).parameters
    reaches = not looks and not metafunc.function.__name__.endswith("refused")
    name = Path(metafunc.definition.path).stem.removeprefix("test_")
    if name in _ON_EACH and "database_url" in metafunc.fixturenames and reaches:
        metafunc.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server of PostgreSQL. A store that stops waits for its next look at it, which here come at once."""
    with closing(PostgresServer()) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("loraplex.adapter_store.postgres._LOOK_S", 0.02)
        yield server


@pytest.fixture(scope="session")
def reused_catalog(postgres: PostgresServer) -> Iterator[tuple[str, Database]]:
    """A catalog of many tests, one after the other: to make one takes longer than most of them."""
    url = postgres.new_database()
    with closing(open_database(url, Path())) as database:
        yield url, database


@pytest.fixture
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty catalog; empty: SQLite."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return ""
    url, database = request.getfixturevalue("reused_catalog")
    with database.transaction() as rows:
        tables = rows.execute("SELECT relname FROM pg_stat_user_tables WHERE relname != 'catalog_version'").fetchall()
        rows.execute(f"TRUNCATE {', '.join(name for (name,) in tables)} RESTART IDENTITY")
    assert isinstance(url, str)
    return url


@pytest.fixture
def database(tmp_path: Path, database_url: str) -> Iterator[Database]:
    """A catalog without a store."""
    with closing(open_database(database_url, tmp_path / "catalog.db")) as opened:
        yield opened


@pytest.fixture
def store_settings(data: Path, database_url: str) -> StoreSettings:
    """The store's settings; override for others."""
    return StoreSettings(data=data, database=database_url, port=0, max_adapter_bytes=4 * 1024 * 1024)


@pytest.fixture
async def store(store_settings: StoreSettings) -> AsyncIterator[Store]:
    """A running store."""
    running = Store(store_settings)
    await running.start()
    yield running
    await running.stop(drain_s=0)


@pytest.fixture
async def client(store: Store) -> AsyncIterator[Client]:
    """A client of the store."""
    connected = Client(f"127.0.0.1:{store.port}")
    yield connected
    await connected.close()


@pytest.fixture
def upload_begun(data: Path) -> Callable[[], Any]:
    """Waits, when called, until some upload's file lies in the data directory."""
    return lambda: until(lambda: any((data / "uploads").glob("*/*")))


@pytest.fixture
def uploads_gone(data: Path) -> Callable[[], Any]:
    """Waits, when called, until no unfinished upload lies in the data directory."""
    return lambda: until(lambda: not any((data / "uploads").iterdir()))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what files say; nothing tells when they change."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
