"""Workers that stand still while they have work: each stream gets the ids of an undisturbed run.

Those that are killed are in tests/trials/chaos.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex.contracts.options import Encode, SamplingParams, StoppingParams
from loraplex_client import AsyncGenerationStream, Generation
from tests.e2e.conftest import TENANT, Cluster, running_cluster, write_hash_adapters
from tests.hash_oracle import expected_ids, expected_vector

pytestmark = pytest.mark.asyncio(loop_scope="module")
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

MODEL = "hash:?vocab=32000&seed=1&step_ms=10"
# Two seconds of steps: a busy machine still loses the worker before its answers have ended.
TOKENS = 200
# Number of texts of the load tester, and of those between two kills.
TEXTS = int(os.environ.get("TEXTS", "250"))
BETWEEN_KILLS = min(300, TEXTS // 2)
# Not all fit on one worker: both have some.
FLAGS = ("--rows", "10", "--stall-s", "1", "--replace-s", "2")
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=-0.5),
    SamplingParams(temperature=1.0, min_p=0.1, seed=12, frequency_penalty=0.25, logit_bias=((7, 1.5),)),
)


@dataclass
class Ask:
    """A request and the ids of its choices; with a stop string it ends before the token that it reads as."""

    stream: AsyncGenerationStream
    truth: list[tuple[int, ...]]
    stop: str | None

    async def starts(self) -> None:
        """Wait for its first tokens."""
        await anext(self.stream)

    async def whole(self) -> Generation:
        """The answer, which must be the oracle's."""
        answer = await self.stream.result()
        assert [choice.token_ids for choice in answer.choices] == self.truth
        assert answer.choices[0].stop == self.stop
        return answer


def ask(cluster: Cluster, number: int, salt: str, tokens: int = TOKENS) -> Ask:
    sampling, n = SAMPLINGS[number % len(SAMPLINGS)], 1 + number % 2
    prompt, adapter, stopping = f"{salt} {number}", ("a", "b", None)[number // 4 % 3], StoppingParams(max_tokens=tokens)
    digest = cluster.digests[adapter] if adapter else ""
    of_prompt = partial(expected_ids, MODEL, list(prompt.encode()), adapter_digest=digest)
    truth = [of_prompt(sampling=sampling, stopping=stopping, choice=choice) for choice in range(n)]
    stop = None
    if number % 3 == 0:  # it ends the first choice alone, late
        # New there, and no byte, which reads as itself.
        at = next(i for i in range(tokens - 20, tokens) if truth[0][i] >= 256 and truth[0][i] not in truth[0][:i])
        stop, truth[0] = f"<{truth[0][at]}>", truth[0][:at]
    # A request has other names for these two.
    names = set(SamplingParams.__dataclass_fields__) - {"bad_word_ids", "processed_logprobs"}
    plain: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    options = plain | {"logit_bias": dict(sampling.logit_bias), "n": n, "stop": [stop] if stop else []}
    stream = cluster.client.generate_stream(prompt, adapter_id=adapter, max_tokens=tokens, **options)
    return Ask(stream, truth, stop)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("loss")
    adapters = write_hash_adapters(directory / "adapters")
    async with running_cluster(directory / "cluster", MODEL, adapters, workers=2, worker_flags=FLAGS) as running:
        yield running


def kill_engine(worker: cluster_pb2.Worker) -> None:
    os.kill(worker.engine_pid, signal.SIGKILL)


def kill_worker(worker: cluster_pb2.Worker) -> None:
    os.kill(worker.pid, signal.SIGKILL)


def stop_engine(worker: cluster_pb2.Worker) -> None:
    """A step that never ends."""
    os.kill(worker.engine_pid, signal.SIGSTOP)


def stop_worker(worker: cluster_pb2.Worker) -> None:
    """Stop the whole worker: nothing of it answers, though its connections stay."""
    os.kill(worker.pid, signal.SIGSTOP)


# Texts whose vectors the test knows.
CHECKED = [f"text number {number}" for number in range(8)]


async def traffic(cluster: Cluster) -> cluster_pb2.GetTrafficResponse:
    async with grpc.aio.insecure_channel(cluster.local.router) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        return await stub.GetTraffic(cluster_pb2.GetTrafficRequest())


async def check_vectors(cluster: Cluster, until: asyncio.Event) -> int:
    """Embed known texts until then; return the number of their tokens."""
    tokens = 0
    truth = [
        expected_vector(MODEL, [*text.encode()], Encode("embed"), adapter_digest=cluster.digests["a"])
        for text in CHECKED
    ]
    while not until.is_set():
        found = await cluster.client.embed(CHECKED, adapter_id="a", normalize=False)
        assert list(found.vectors) == truth
        tokens += found.usage.prompt_tokens
        await asyncio.sleep(0.02)  # beside the answers, it is to be little work
    return tokens


async def serve_both(cluster: Cluster) -> bool:
    """Tell whether both workers take jobs."""
    return [state.phase for state in await cluster.workers()] == [cluster_pb2.WORKER_PHASE_SERVING] * 2


@pytest.mark.parametrize("lose", [stop_engine, stop_worker])
async def test_a_worker_that_is_lost_changes_no_id(
    cluster: Cluster, eventually: Eventually, lose: Callable[[cluster_pb2.Worker], None]
) -> None:
    both_serve = partial(serve_both, cluster)
    await eventually(both_serve)
    asks = [ask(cluster, number, lose.__name__) for number in range(12)]
    await asyncio.gather(*(request.starts() for request in asks))
    victim = max(await cluster.workers(), key=lambda state: state.rows_running)
    answered = asyncio.Event()
    texts = asyncio.create_task(check_vectors(cluster, answered))
    lose(victim)
    try:
        wholes = await asyncio.gather(*(request.whole() for request in asks))
        answered.set()
        assert await texts
    finally:
        if lose is stop_worker:
            os.kill(victim.pid, signal.SIGCONT)
    assert sum(whole.continuations for whole in wholes) > 0, "the lost worker held nothing"
    # A worker that wakes up later has no jobs any more, and works again.
    await eventually(both_serve)
    await eventually(cluster.idle)
    again = [ask(cluster, number, f"after {lose.__name__}") for number in range(12)]
    await asyncio.gather(*(request.whole() for request in again))


@pytest.mark.skipif("TEXTS" not in os.environ, reason="long: make texts; make chaos has vectors among its requests")
async def test_every_text_is_answered_once_while_workers_are_killed(
    cluster: Cluster, tmp_path: Path, eventually: Eventually
) -> None:
    """The load tester sends TEXTS texts, beside a client whose vectors must be the model's."""
    await eventually(partial(serve_both, cluster))
    before = await traffic(cluster)
    flags = "--task embed --texts 25 --concurrency 8 --prompt-tokens 20 -a a -a b -a base --json"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loraplex.cli", "loadtest", *flags.split(), "--requests", str(TEXTS // 25),
        "--tenant", TENANT, "--router", cluster.local.router, "--out", str(tmp_path),
        stdout=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip
    loading = asyncio.create_task(process.communicate())
    loaded = asyncio.Event()
    loading.add_done_callback(lambda _: loaded.set())
    checked = asyncio.create_task(check_vectors(cluster, loaded))
    kills, at = 0, before.prompt_tokens
    while not loading.done():
        done = (await traffic(cluster)).prompt_tokens
        due = done - at >= BETWEEN_KILLS * 20 and kills < max(1, TEXTS // 500)
        if not due or not await serve_both(cluster):  # the next kill comes when both are back
            await asyncio.sleep(0.05)
            continue
        workers = await cluster.workers()
        # Mostly engines: the launcher replaces a few workers a minute.
        kill = kill_engine if kills % 8 else kill_worker
        with contextlib.suppress(ProcessLookupError):  # it is another process by now
            kill(workers[kills % 2])
        kills, at = kills + 1, done
    (run,) = json.loads((await loading)[0])["runs"]
    assert run["statuses"] == {"OK": TEXTS // 25}
    assert run["figures"]["texts"] == TEXTS
    assert kills
    tokens = await checked
    after = await traffic(cluster)
    assert after.prompt_tokens - before.prompt_tokens == 20 * TEXTS + tokens, "counted once each"
    assert after.requests["OK"] - before.requests["OK"] == TEXTS // 25 + tokens // (8 * len(CHECKED[0]))
    await eventually(partial(serve_both, cluster))
    await eventually(cluster.idle)
    print(f"{TEXTS} texts, {kills} kills, {run['figures']['continuations']} texts went on elsewhere")
