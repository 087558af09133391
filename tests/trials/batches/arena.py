"""A cluster on which a batch runs while its processes are killed, and the check of what it has made."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplex.batch_runner.line_call import seed_of
from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex_client import AsyncBatchClient, AsyncClient, AsyncStoreClient, Batch, LoraplexError
from tests.hash_oracle import expected_ids

MODEL = "hash:?vocab=32000&seed=1"
TENANT, ADAPTERS = "acme", ("a", "b", "c", "d", "e")
# Kinds of processes that are killed in turn.
KINDS = ("runner", "router", "worker", "store", "valkey")
# Pause in seconds after a kill, before the process is started again, and until the next kill.
DOWN_S, NEXT_S = 0.3, 2.0
TOKENS = 24
# Timeout in seconds for the batch's end after the last kill; number of interactive calls that are measured.
END_S, CALLS = 600.0, 200
# Time in seconds for routers to write the last usage events.
EVENTS_S = 30.0


@dataclass
class Verdict:
    """What a batch has made: by kind, what is wrong with it, and the tokens of its lines and of its events."""

    kills: Counter[str] = field(default_factory=Counter)
    lines: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    failed: int = 0
    tokens: tuple[int, int] = (0, 0)
    charged: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Return whether each line has its answer once, and is charged once."""
        return not (self.lost or self.doubled or self.wrong or self.failed) and self.tokens == self.charged

    def __str__(self) -> str:
        return (
            f"{self.lines} lines, kills: {dict(self.kills)}, {self.seconds:.0f} s: {self.lost} lost, "
            f"{self.doubled} doubled, {self.wrong} wrong, {self.failed} failed; "
            f"tokens of lines {self.tokens}, of usage events {self.charged}"
        )


class Arena:
    """The cluster, with two routers, two workers, and a second runner."""

    def __init__(self, local: LocalCluster, digests: Mapping[str, str], usage: Path, seed: int) -> None:
        self.local, self._digests, self._usage = local, digests, usage
        self._random, self._tokens = random.Random(seed), TOKENS

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path, seed: int, step_ms: int = 5) -> AsyncIterator[Arena]:
        """Start the cluster in a directory. Slower steps make a batch of fewer tokens last as long."""
        usage, model = directory / "usage.jsonl", f"{MODEL}&step_ms={step_ms}"
        settings = ClusterSettings(
            model,
            workers=2,
            routers=2,
            port=0,
            store_port=0,
            http_port=0,
            data_dir=directory / "data",
            router_flags=("--usage-file", str(usage)),
        )
        async with LocalCluster(settings) as local:
            digests = {}
            async with AsyncStoreClient(local.store, TENANT) as store:
                base = read_base_model(model)
                await store.register_model(registered(base), base.files)
                for name in ADAPTERS:
                    files = directory / name
                    files.mkdir()
                    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
                    (files / "adapter_config.json").write_text(json.dumps(config))
                    (files / "adapter_model.safetensors").write_bytes(f"weights of {name}".encode())
                    digests[name] = (await store.push(files, name)).revision.digest
            await local.wait_serving()
            yield cls(local, digests, usage, seed)

    async def run(self, lines: int, kills: int, tokens: int = TOKENS) -> Verdict:
        """Run a batch of lines of so many tokens under kills, and check it."""
        self._tokens = tokens
        verdict = Verdict(lines=lines)
        before = self._charged()
        began = time.monotonic()
        async with AsyncBatchClient(self.local.store, TENANT) as client:
            batch = await client.create((await client.upload_file(_file(lines, tokens))).id)
            for number in range(kills):
                await asyncio.sleep(NEXT_S * self._random.uniform(0.3, 1.0))
                kind = KINDS[number % len(KINDS)]
                await self._kill(kind)
                verdict.kills[kind] += 1
            async with asyncio.timeout(END_S):
                batch = await self._ended(client, batch)
            verdict.seconds = time.monotonic() - began
            await self._check(client, batch, verdict)
        async with asyncio.timeout(EVENTS_S):
            while (charged := _minus(self._charged(), before)) != verdict.tokens:
                verdict.charged = charged
                await asyncio.sleep(0.2)
        verdict.charged = charged
        return verdict

    async def interactive_p95(self, lines: int) -> tuple[float, float]:
        """Return the p95 in seconds of interactive calls alone, and while a batch runs."""
        async with (
            AsyncClient(self.local.router, TENANT) as caller,
            AsyncBatchClient(self.local.store, TENANT) as client,
        ):
            alone = await _p95(caller)
            batch = await client.create((await client.upload_file(_file(lines, TOKENS))).id)
            while (await client.get(batch.id)).completed == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            beside = await _p95(caller)
            assert not (await client.get(batch.id)).has_ended, "the batch is too short to measure beside it"
            await client.cancel(batch.id)
            await self._ended(client, batch)
        return alone, beside

    async def _kill(self, kind: str) -> None:
        """Kill a process of a kind, and start it again, or another in its place."""
        names = [
            name
            for name, process in self.local.processes.items()
            if name.partition("-")[0] == kind and not process.exited.done()
        ]
        name = self._random.choice(names)
        self.local.kill(name)
        await asyncio.sleep(DOWN_S)
        if kind == "worker":
            await self.local.processes[await self.local.start_worker()].wait_ready()
        else:
            await self.local.restart(name)

    async def _ended(self, client: AsyncBatchClient, batch: Batch) -> Batch:
        while not batch.has_ended:
            await asyncio.sleep(0.1)
            try:
                batch = await client.get(batch.id)
            except LoraplexError:  # the store was killed
                continue
        return batch

    async def _check(self, client: AsyncBatchClient, batch: Batch, verdict: Verdict) -> None:
        pieces = list[bytes]()
        if batch.output_file:
            await client.download_file(batch.output_file, pieces.append)
        answers = [json.loads(line) for line in b"".join(pieces).split(b"\n") if line]
        counts = Counter(one["custom_id"] for one in answers)
        verdict.failed = batch.failed
        verdict.lost = verdict.lines - len(counts) - verdict.failed
        verdict.doubled = sum(count - 1 for count in counts.values())
        for one in answers:
            number, body = int(one["custom_id"]), one["response"]["body"]
            expected = await asyncio.to_thread(self._expected, batch.id, number)
            verdict.wrong += body["choices"][0]["message"]["content"] != expected
            used = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
            verdict.tokens = (verdict.tokens[0] + used[0], verdict.tokens[1] + used[1])

    def _expected(self, batch: str, number: int) -> str:
        ids = expected_ids(
            MODEL,
            list(f"user: {_text(number)}\nassistant: ".encode()),
            adapter_digest=self._digests[_adapter(number)],
            sampling=SamplingParams(temperature=1.0, seed=seed_of(batch, number + 1)),
            stopping=StoppingParams(max_tokens=self._tokens),
        )
        return "".join(chr(token) if token < 256 else f"<{token}>" for token in ids)

    def _charged(self) -> tuple[int, int]:
        """Return the tokens of all batches' events, of which one of an id counts."""
        counted = dict[str, tuple[int, int]]()
        for line in self._usage.read_text().splitlines() if self._usage.exists() else ():
            event = json.loads(line)
            data = event["data"]
            if data["request_id"].startswith("batch_"):
                own = (data["input_tokens"], data["output_tokens"])
                counted[event["id"]] = max(own, counted.get(event["id"], own))
        return sum(one[0] for one in counted.values()), sum(one[1] for one in counted.values())


def _minus(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] - other[0], one[1] - other[1]


def _adapter(number: int) -> str:
    return ADAPTERS[number % len(ADAPTERS)]


def _text(number: int) -> str:
    return f"Question {number}"


def _file(lines: int, tokens: int) -> bytes:
    def line(number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": _text(number)}]
        body = {"model": _adapter(number), "messages": messages, "max_tokens": tokens}
        return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}

    return "".join(f"{json.dumps(line(number))}\n" for number in range(lines)).encode()


async def _p95(caller: AsyncClient) -> float:
    """Return the p95 in seconds of interactive calls, one after the other."""
    seconds = list[float]()
    for number in range(CALLS):
        began = time.monotonic()
        await caller.chat(f"Hi {number}", adapter_id=_adapter(number), max_tokens=TOKENS)
        seconds.append(time.monotonic() - began)
    return statistics.quantiles(seconds, n=20)[-1]
