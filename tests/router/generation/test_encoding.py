"""Calls of Embed and Classify over a real queue: their jobs, what ends them, which models and adapters serve them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from loraplex.contracts.broker.ledger import Ledger
from loraplex.contracts.broker.messages import AdapterRef, Capacity, Job
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.terms import Placement, QueueLimits
from loraplex.contracts.options import FinishReason
from loraplex.router.api.encoding import normalized, probabilities
from loraplex.router.catalog.adapters import AdapterConfigs, Classifier, check_generates, find_classifier
from loraplex.router.catalog.models import ServedModel
from loraplex.router.catalog.store_client import Manifest, ResolvedAdapter
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.links import Frame, RelayReach
from loraplex.router.generation.admission import Admission
from loraplex.router.generation.generation import Generation
from loraplex.router.generation.resume import ResumeKeys, ResumeTokens
from loraplex.router.generation.unary_calls import TEXTS_AT_ONCE, UnaryCalls, Vector
from loraplex.router.quotas.plans import Plans
from loraplex.router.quotas.quotas import Quotas
from loraplex.router.request import EncodeRequest, Summary, TextPair
from loraplex.router.text.tokenizer import HashTokenizer, PromptTokenizer
from loraplex.runtime.rpc.errors import CallError, Exhausted, Internal, InvalidField, Mismatch, Unavailable
from tests.router.recording_link import KEYS, RecordingLink

ALL = ("generate", "embed", "classify")
MANIFEST = Manifest("tiny", "sha256:0", "hash", 40, 512, {}, tasks=ALL, labels=("no", "yes"))
ADAPTER = AdapterRef("tenants/acme/adapters/a/revisions/sha256:1", "sha256:1", 8, 1000)
ROOMY = Capacity(rows=200, rows_limit=200, tokens=10_000, max_tokens=4096, max_rank=64)


class Cluster:
    """The models, workers and store that a call sees. `configs` by revision."""

    def __init__(self) -> None:
        self.manifest = MANIFEST
        self.workers = [SimpleNamespace(max_rank=16, max_tokens=30)]
        self.config: dict[str, Any] = {}
        self.resolved = 0
        self.expects = False

    def get(self, name: str) -> Any:
        return ServedModel(self.manifest, HashTokenizer(), {})

    def revisions(self, name: str) -> list[Any]:
        return [self.get(name)]

    def serving(self, name: str, digest: str = "") -> Any:
        return self.workers

    def refusal(self, name: str, adapter: Any) -> None:
        """No plan refuses a model."""

    def expects_worker(self, name: str, digest: str = "") -> bool:
        return self.expects

    async def resolve(self, tenant: str, name: str) -> ResolvedAdapter:
        self.resolved += 1
        return ResolvedAdapter(ADAPTER, "sha256:0")

    async def config_of(self, tenant: str, revision: str) -> bytes:
        return json.dumps(self.config).encode()


def asking(*inputs: Any, **more: Any) -> EncodeRequest:
    fields = tuple(f"inputs[{index}]" for index in range(len(inputs)))
    return EncodeRequest("acme", more.pop("task", "embed"), inputs, fields, **more)


class Calls:
    """Calls of a router, and a worker that answers each text by a vector of its ids' sum."""

    def __init__(self, cluster: Any, dispatcher: Dispatcher, queue: JobQueue, quotas: Quotas) -> None:
        self.dispatcher = dispatcher
        encoder, configs = PromptTokenizer(1), AdapterConfigs(cluster)
        self.generation = Generation(cluster, dispatcher, ResumeTokens(ResumeKeys()), quotas, encoder)
        admission = Admission(cluster, cluster, configs, "here", RelayReach(), encoder)
        self.unary_calls = UnaryCalls(self.generation, admission)
        self.link = RecordingLink("w")
        self._queue = queue

    def start(self, request: EncodeRequest) -> asyncio.Task[tuple[list[Vector], Summary]]:
        return asyncio.create_task(self.unary_calls.encode(request, None, lambda vector: vector))

    async def claim(self, count: int) -> list[Job]:
        """Claim jobs until there are so many."""
        claimed: list[Job] = []
        async with asyncio.timeout(60):
            while len(claimed) < count:
                claimed += (await self._queue.claim("sha256:0", ROOMY)).jobs or []
                if len(claimed) < count:
                    await self._queue.wait_for_work(timeout_s=1)
        return claimed

    def answer(self, job: Job, *vector: float, failure: CallError | None = None) -> None:
        finish = None if failure else FinishReason.LENGTH
        frame = Frame(job.job_id, 1, 0, (), finish=finish, failure=failure, adapter_ms=2.0, vector=vector)
        self.dispatcher.receive_frame(self.link, frame)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def calls(cluster: Cluster, dispatcher: Dispatcher, queue: JobQueue, quotas: Quotas) -> AsyncIterator[Calls]:
    calls = Calls(cluster, dispatcher, queue, quotas)
    yield calls
    assert dispatcher.jobs == ()


async def test_each_text_is_a_job_of_one_revision_and_the_answers_keep_the_order(
    calls: Calls, cluster: Cluster
) -> None:
    texts = [TextPair("ab", "c"), (1, 2, 300), *(f"{number}" for number in range(2 * TEXTS_AT_ONCE))]
    running = calls.start(asking(*texts, adapter="a", priority=7, request_id="r", pooling="mean"))
    first = await calls.claim(TEXTS_AT_ONCE)
    assert len(list(calls.dispatcher.jobs)) == TEXTS_AT_ONCE  # others get turns between those of a large call
    by_ids = {job.prompt_ids: job for job in first}
    pair, ids = by_ids[tuple(b"abc")], by_ids[1, 2, 300]
    assert pair.encode is not None
    assert (pair.encode.pair_tokens, pair.encode.pooling, pair.stopping.max_tokens) == (1, "mean", 0)
    assert (ids.adapter, ids.priority, ids.tenant, ids.request_id) == (ADAPTER, 7, "acme", "r")
    left = len(texts)
    for job in reversed(first):
        calls.answer(job, float(sum(job.prompt_ids)))
        left -= 1
    while left:
        for job in await calls.claim(1):
            calls.answer(job, float(sum(job.prompt_ids)))
            left -= 1
    vectors, summary = await running
    wanted = [b"abc", (1, 2, 300), *(f"{number}".encode() for number in range(2 * TEXTS_AT_ONCE))]
    assert [(one.values, one.prompt_tokens) for one in vectors] == [((float(sum(ids)),), len(ids)) for ids in wanted]
    assert (summary.request_id, summary.adapter_revision) == ("r", ADAPTER.revision)
    assert (summary.prompt_tokens, summary.adapter_s) == (sum(map(len, wanted)), 0.002)
    assert cluster.resolved == 1


async def test_the_first_error_ends_all_texts_of_a_call(calls: Calls) -> None:
    running = calls.start(asking("a", "b", "c", "d"))
    jobs = await calls.claim(4)
    calls.answer(jobs[0], 0.5)
    calls.answer(jobs[2], failure=Internal("no memory", reason="OUT_OF_MEMORY"))
    with pytest.raises(Internal, match="no memory"):
        await running
    # Those that a worker reported are cancelled there; the others have left the queue.
    assert ("ack", jobs[0].job_id, 1) in calls.link.sent
    await calls.dispatcher.drain_tasks()


async def test_a_router_that_stops_and_a_client_that_leaves_end_a_call(calls: Calls) -> None:
    left = calls.start(asking("a", "b"))
    await calls.claim(2)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert calls.dispatcher.jobs == ()
    running = calls.start(asking("a", "b"))
    await calls.claim(2)
    calls.generation.drain()
    with pytest.raises(Unavailable) as stopped:
        await running
    with pytest.raises(Unavailable) as late:
        await calls.start(asking("a"))
    assert (stopped.value.reason, late.value.reason) == ("ROUTER_DRAINING", "ROUTER_DRAINING")


async def test_a_vector_that_is_not_what_the_job_asks_for_reaches_no_client(calls: Calls, cluster: Cluster) -> None:
    running = calls.start(asking("a"))
    (job,) = await calls.claim(1)
    calls.answer(job)
    with pytest.raises(Internal, match="0 logits of 0 labels"):
        await running
    running = calls.start(asking("a", task="classify"))
    (job,) = await calls.claim(1)
    calls.answer(job, 0.5, 0.5, 0.5)
    with pytest.raises(Internal, match="3 logits of 2 labels"):
        await running
    cluster.workers.clear()
    with pytest.raises(Unavailable) as caught:
        await calls.start(asking("a"))
    assert caught.value.reason == "NO_WORKER"


async def test_the_largest_worker_bounds_texts(calls: Calls, cluster: Cluster) -> None:
    with pytest.raises(InvalidField, match=r"inputs\[1\]: .*maximum context length is 30 tokens; 31 tokens do not fit"):
        await calls.start(asking((1,), (1,) * 31))
    running = calls.start(asking((1,) * 31, truncate=True))
    (job,) = await calls.claim(1)
    calls.answer(job, 0.5)
    assert (await running)[0] == [Vector((0.5,), 30, Classifier())]
    cluster.workers[0].max_rank = 4
    with pytest.raises(Mismatch, match="rank 8; the workers take at most 4"):
        await calls.start(asking("a", adapter="a"))


@pytest.mark.parametrize(
    ("tasks", "config", "task", "found"),
    [
        (ALL, {}, "classify", Classifier(("no", "yes"))),
        (ALL, {}, "embed", Classifier()),
        (("embed",), {"modules_to_save": ["classifier"], "id2label": {"0": "a", "1": "b"}}, "classify", ("a", "b")),
        (ALL, {"modules_to_save": ["score"]}, "classify", ("LABEL_0", "LABEL_1", "LABEL_2")),
        (("generate", "embed"), {}, "classify", "has no classification head; name an adapter that brings one"),
        (("embed",), {"modules_to_save": ["lm_head"]}, "classify", "has no classification head"),
        (("generate",), {}, "embed", r"loraplex models push --replace"),
    ],
)
async def test_base_and_adapter_say_what_is_served(
    cluster: Cluster, tasks: tuple[str, ...], config: dict[str, Any], task: Any, found: Any
) -> None:
    store: Any = cluster
    manifest, cluster.config = replace(MANIFEST, tasks=tasks), config
    checking = find_classifier(asking("a", task=task), manifest, ADAPTER, AdapterConfigs(store))
    if isinstance(found, str):
        with pytest.raises(Mismatch, match=found) as caught:
            await checking
        assert caught.value.reason == "WRONG_TASK"
    elif isinstance(found, Classifier):
        assert await checking == found
    else:
        assert (await checking).labels_of(len(found)) == found


def test_the_base_says_what_its_own_labels_mean_and_an_encoder_generates_nothing() -> None:
    check_generates(MANIFEST)
    with pytest.raises(Mismatch, match="is an encoder and generates nothing; call Embed or Classify"):
        check_generates(replace(MANIFEST, tasks=("embed", "classify")))


async def test_the_base_says_what_its_classifier_solves(cluster: Cluster) -> None:
    store: Any = cluster
    manifest = replace(MANIFEST, problem_type="multi_label_classification")
    classifier = await find_classifier(asking("a", task="classify"), manifest, None, AdapterConfigs(store))
    assert classifier == Classifier(("no", "yes"), "multi_label_classification")


async def test_a_full_queue_ends_a_call_and_leaves_nothing(cluster: Cluster, redis: Redis) -> None:
    queue = JobQueue(redis, KEYS, limits=QueueLimits(tenant_jobs=2))
    dispatcher = Dispatcher(lambda *_: queue, lambda *_: Placement())
    calls = Calls(cluster, dispatcher, queue, Quotas(Ledger(redis), Plans()))
    with pytest.raises(Exhausted, match="2 jobs may wait of acme"):
        await calls.start(asking("a", "b", "c", "d"))
    await dispatcher.drain_tasks()
    assert dispatcher.jobs == ()
    assert not (await queue.claim("sha256:0", ROOMY)).jobs


def test_vectors_have_length_1_whatever_their_size() -> None:
    assert normalized((3.0, -4.0)) == [0.6, -0.8]
    for scale in (1e-30, 1.0, 1e30):
        assert math.hypot(*normalized((scale, 2 * scale, -3 * scale))) == pytest.approx(1.0)
    assert normalized((0.0, 0.0)) == (0.0, 0.0)


def test_logits_are_probabilities_by_the_kind_of_classifier() -> None:
    logits = (1.0, 0.0, -1e4)
    softmax = probabilities(logits, Classifier(("a", "b", "c")))
    assert softmax == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1), 0.0])
    assert probabilities((1e4, 1e4), Classifier(("a", "b"))) == [0.5, 0.5]
    several = probabilities((0.0, 800.0, -800.0), Classifier(("a", "b", "c"), "multi_label_classification"))
    assert several == pytest.approx([0.5, 1.0, 0.0])
    assert probabilities((2.0,), Classifier(("a",))) == pytest.approx([1 / (1 + math.exp(-2))])
    assert probabilities((2.5,), Classifier(("a",), "regression")) == (2.5,)
