"""Sends the cases to a real store and router."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import BaseModel, read_base_model
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.rpc.server import channel_options
from loraplex_client import AsyncStoreClient
from tests.router.small_tokenizers import files_of
from tests.trials.hostile.cases import ADMIN, STORE, TENANT, Case
from tests.trials.hostile.specs import TEMPLATES
from tests.trials.hostile.uploads import BASE, MODULES

MODEL = "hash:?vocab=32000&seed=1"
# Statuses of a refusal that says what is wrong; all others are the server's own failure.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.ALREADY_EXISTS,
}
_TIMEOUT_S = 60.0
# Text of the error that grpc.aio's client makes itself where a stream is refused while it still sends.
OWN_ERROR = "Internal error from Core"


@dataclass
class Outcome:
    """Numbers of cases by status, lines about those that ended otherwise, seconds of each by name."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@asynccontextmanager
async def running(
    directory: Path, model: str = MODEL, worker_flags: tuple[str, ...] = (), http_port: int | None = None
) -> AsyncIterator[LocalCluster]:
    """Run a cluster of a hash model; a second base model has tokenizer files that panic, and many modules."""
    settings = ClusterSettings(
        model, port=0, store_port=0, http_port=http_port, data_dir=directory, worker_flags=worker_flags
    )
    panics = b'{"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""},' + files_of("byte-level")[
        "tokenizer.json"
    ].replace(b'"normalizer": null,', b"").lstrip(b"{ \n")
    wide = BaseModel(BASE, "sha256:" + "1" * 64, "llama", 64, 32, (), MODULES, files={"tokenizer.json": panics})
    async with LocalCluster(settings) as cluster:
        async with AsyncStoreClient(cluster.store, "operator") as store:
            for base in (await asyncio.to_thread(read_base_model, model), wide):
                await store.register_model(registered(base), base.files)
        await cluster.wait_serving()
        async with AsyncStoreClient(cluster.store, TENANT) as store:
            for name, template in TEMPLATES.items():
                files = directory / "adapters" / name
                files.mkdir(parents=True)
                config = {"peft_type": "LORA", "r": 1, "loraplex_chat": {"template": template}}
                (files / CONFIG_FILE).write_text(json.dumps(config))
                (files / WEIGHTS_FILE).write_bytes(b"any")
                await store.push(files, name, base_model="hash")
        yield cluster


async def attack(cluster: LocalCluster, cases: Iterable[Case], calls: int, per_s: float = math.inf) -> Outcome:
    """Send all cases: at most `calls` at once, and at most `per_s` a second."""
    outcome, waiting, sent = Outcome(), iter(cases), 0
    began = time.monotonic()
    async with (
        grpc.aio.insecure_channel(cluster.router, options=channel_options()) as router,
        grpc.aio.insecure_channel(cluster.store, options=channel_options()) as store,
    ):

        async def work() -> None:
            nonlocal sent
            for case in waiting:
                sent += 1
                await asyncio.sleep(began + sent / per_s - time.monotonic())
                await send_case(store if case.method.startswith((STORE, ADMIN)) else router, case, outcome)

        await asyncio.gather(*(work() for _ in range(calls)))
    return outcome


async def send_case(channel: grpc.aio.Channel, case: Case, outcome: Outcome) -> None:
    """Send a case, and count its end."""
    name, said = f"{case.method.rpartition('/')[2]}: {case.name}", OWN_ERROR
    while said == OWN_ERROR:
        began = time.monotonic()
        code, said = await _status_of(channel, case)
    outcome.seconds[name] = time.monotonic() - began
    outcome.statuses[code.name] += 1
    # Fuzzed calls register base models, for which there is no worker.
    unserved = code is grpc.StatusCode.UNAVAILABLE and said.startswith("no worker serves ")
    if not (code in REFUSALS or unserved or (case.served and code is grpc.StatusCode.OK)):
        outcome.failures.append(f"{name}: {code.name} {said[:200]}")
    elif not said.isprintable():
        outcome.failures.append(f"{name}: {code.name} in more than a line: {said[:200]!r}")


async def _status_of(channel: grpc.aio.Channel, case: Case) -> tuple[grpc.StatusCode, str]:
    one = len(case.messages) == 1  # the same on the wire
    send: Any = channel.unary_stream(case.method) if one else channel.stream_stream(case.method)
    try:
        async for _ in send(
            case.messages[0] if one else iter(case.messages), metadata=case.metadata, timeout=_TIMEOUT_S
        ):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
