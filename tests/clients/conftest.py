"""A real gRPC server on a real port, whose inference service says what a test tells it to say."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.cluster.v1 import cluster_pb2
from loraplex.runtime.rpc.errors import CallError
from loraplex.runtime.rpc.server import Server
from loraplex.runtime.tenancy.guard import open_guard

HANG = "hang"
# An entry of a script: an event to send, an error or a bare status to end with, an event to wait for, or HANG.
Step = inference_pb2.GenerateEvent | CallError | grpc.StatusCode | threading.Event | str
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once: nobody is restarting."""
    monkeypatch.setattr("loraplex_client.retries.PAUSE_S", 0.01)


class ScriptedService(inference_pb2_grpc.InferenceServiceServicer):
    """Answers Generate and Resume by its scripts; keeps what it was asked, and notes when a caller went away."""

    def __init__(self) -> None:
        self.script: list[Step] = []
        # Instead, one for each call of Generate.
        self.scripts: list[list[Step]] = []
        self.resume_script: list[Step] = []
        # The error that Tokenize fails with.
        self.unary_failure: CallError | grpc.StatusCode | None = None
        # The errors that the next calls of Embed fail with.
        self.encode_failures: list[CallError] = []
        # Trailing metadata of the answers of calls without a stream.
        self.limits: tuple[tuple[str, str], ...] = ()
        # Called in the server's thread when a call has come.
        self.on_call: Callable[[], object] = lambda: None
        self.requests: list[Any] = []
        self.tenants: list[str] = []
        self.deadlines_s: list[float | None] = []
        self.cancelled = threading.Event()
        self.workers: list[cluster_pb2.Worker] = []

    def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.tenants.append(dict(context.invocation_metadata()).get("x-loraplex-tenant", ""))
        self.deadlines_s.append(context.time_remaining())
        self.on_call()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self._note(request, context)
        async for event in self._play(self.scripts.pop(0) if self.scripts else self.script, context):
            yield inference_pb2.GenerateResponse(event=event)

    async def Resume(
        self, request: inference_pb2.ResumeRequest, context: Any
    ) -> AsyncIterator[inference_pb2.ResumeResponse]:
        self._note(request, context)
        async for event in self._play(self.resume_script, context):
            yield inference_pb2.ResumeResponse(event=event)

    async def _play(self, script: list[Step], context: Any) -> AsyncIterator[inference_pb2.GenerateEvent]:
        try:
            for step in script:
                if isinstance(step, CallError):
                    raise step
                if isinstance(step, grpc.StatusCode):
                    await context.abort(step, "no details")
                elif isinstance(step, threading.Event):
                    await asyncio.to_thread(step.wait, WAIT_S)
                elif isinstance(step, str):
                    await asyncio.Event().wait()
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        self._note(request, context)
        if isinstance(self.unary_failure, CallError):
            raise self.unary_failure
        if self.unary_failure is not None:
            await context.abort(self.unary_failure, "no details")
        text = request.prompt or "".join(message.content for message in request.chat.messages)
        return inference_pb2.TokenizeResponse(token_ids=text.encode())

    async def CountTokens(self, request: inference_pb2.CountTokensRequest, context: Any) -> Any:
        self._note(request, context)
        return inference_pb2.CountTokensResponse(prompt_tokens=7, context_length=256)

    async def Score(self, request: inference_pb2.ScoreRequest, context: Any) -> Any:
        self._note(request, context)
        context.set_trailing_metadata(self.limits)
        score = inference_pb2.ContinuationScore(token_ids=[5, 6], logprobs=[-0.5, -1.5], sum=-2.0, greedy=[True, False])
        return inference_pb2.ScoreResponse(
            scores=[score] * len(request.continuations),
            adapter_revision="tenants/acme/adapters/pirate/revisions/sha256:00",
            usage=inference_pb2.Usage(prompt_tokens=4, cached_tokens=2),
            request_id=request.spec.request_id,
        )

    async def Decide(self, request: inference_pb2.DecideRequest, context: Any) -> Any:
        self._note(request, context)
        decision = inference_pb2.Decision(
            probabilities=[0.75, 0.25], label_mass=0.5, scored_labels=1, logprobs=[-0.981, -2.079]
        )
        return inference_pb2.DecideResponse(
            decisions=[decision] * len(request.questions), usage=inference_pb2.Usage(prompt_tokens=4, cached_tokens=2)
        )

    async def Rerank(self, request: inference_pb2.RerankRequest, context: Any) -> Any:
        self._note(request, context)
        results = [
            inference_pb2.DocumentScore(index=index, score=0.5, logit=0.0)
            for index in reversed(range(len(request.documents)))
        ]
        usage = inference_pb2.Usage(prompt_tokens=4, cached_tokens=2)
        return inference_pb2.RerankResponse(results=results, usage=usage, request_id=request.request_id)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> Any:
        self._note(request, context)
        if self.encode_failures:
            raise self.encode_failures.pop(0)
        context.set_trailing_metadata(self.limits)
        return inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=[0.5, len(one.text)]) for one in request.spec.inputs],
            summary=self._encoded(request.spec),
        )

    async def Classify(self, request: inference_pb2.ClassifyRequest, context: Any) -> Any:
        self._note(request, context)
        context.set_trailing_metadata(self.limits)
        one = inference_pb2.Classification(label="good", probabilities=[0.25, 0.75], logits=[0.0, 1.0])
        return inference_pb2.ClassifyResponse(
            classifications=[one] * len(request.spec.inputs),
            labels=["bad", "good"],
            summary=self._encoded(request.spec),
        )

    def _encoded(self, spec: inference_pb2.EncodeSpec) -> inference_pb2.EncodeSummary:
        return inference_pb2.EncodeSummary(
            adapter_revision="tenants/acme/adapters/pirate/revisions/sha256:00" if spec.adapter else "",
            usage=inference_pb2.Usage(prompt_tokens=len(spec.inputs)),
            request_id=spec.request_id,
        )

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        self._note(request, context)
        each = [bytes([token]) for token in request.token_ids] if request.token_bytes else []
        text = bytes(request.token_ids).decode(errors="replace")
        return inference_pb2.DetokenizeResponse(text=text, token_bytes=each)

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(name="tiny", digest="sha256:00", context_length=512, max_rank=2)
        return inference_pb2.ListModelsResponse(models=[model])

    async def list_workers(self, request: Any, context: Any) -> cluster_pb2.ListWorkersResponse:
        """Answer ClusterService's method of this name."""
        return cluster_pb2.ListWorkersResponse(workers=self.workers)

    async def get_traffic(self, request: Any, context: Any) -> cluster_pb2.GetTrafficResponse:
        """Answer ClusterService's method of this name, with traffic of acme."""
        return cluster_pb2.GetTrafficResponse(adapters=[cluster_pb2.AdapterTraffic(tenant="acme")])


class ServerThread:
    """A server on an event loop of its own, so that blocking clients can be tried in the test's thread."""

    def __init__(self) -> None:
        self.address = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, add: Callable[[Any], None]) -> None:
        """Serve what `add` adds; returns when it listens."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(add, ready)))
        self._thread.start()
        ready.result()

    async def _serve(self, add: Callable[[Any], None], ready: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = Server(open_guard())
        add(server.services)
        self.address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        ready.set_result(None)
        await self._stop.wait()
        await server.stop(0)

    def shut_down(self) -> None:
        """Stop serving and join the thread."""
        assert self._loop is not None
        assert self._stop is not None
        assert self._thread is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class Scripted(ServerThread):
    """The server with its service."""

    def __init__(self) -> None:
        super().__init__()
        self.service = ScriptedService()


@pytest.fixture
def server() -> Iterator[Scripted]:
    with serving() as scripted:
        yield scripted


@pytest.fixture
def other_server() -> Iterator[Scripted]:
    with serving() as scripted:
        yield scripted


@contextmanager
def serving() -> Iterator[Scripted]:
    """A scripted server."""
    scripted = Scripted()

    def add(grpc_server: Any) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(scripted.service, grpc_server)
        list_workers = grpc.unary_unary_rpc_method_handler(
            scripted.service.list_workers,
            request_deserializer=cluster_pb2.ListWorkersRequest.FromString,
            response_serializer=cluster_pb2.ListWorkersResponse.SerializeToString,
        )
        traffic = grpc.unary_unary_rpc_method_handler(
            scripted.service.get_traffic,
            request_deserializer=cluster_pb2.GetTrafficRequest.FromString,
            response_serializer=cluster_pb2.GetTrafficResponse.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(
            "loraplex.cluster.v1.ClusterService", {"ListWorkers": list_workers, "GetTraffic": traffic}
        )
        grpc_server.add_generic_rpc_handlers((generic,))

    scripted.start(add)
    try:
        yield scripted
    finally:
        scripted.shut_down()


@pytest.fixture
def answer() -> list[inference_pb2.GenerateEvent]:
    """The events of a whole answer: ` Ahoy` in two deltas and a text that came late, then the end."""
    event = inference_pb2.GenerateEvent
    return [
        event(resume_token="token", delta=inference_pb2.Delta(offset=0, token_ids=[7, 8], text=" Ah")),
        event(delta=inference_pb2.Delta(offset=2, token_ids=[9], text="o")),
        event(delta=inference_pb2.Delta(offset=3, text="y")),
        event(finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP, stop_string="!")),
        event(
            summary=inference_pb2.Summary(
                adapter_revision="tenants/acme/adapters/pirate/revisions/sha256:00",
                usage=inference_pb2.Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=3),
                timings=inference_pb2.Timings(queue=0.5, adapter=0.25, ttft=1.0, decode=2.0),
                continuations=1,
                request_id="r-1",
                speculative_decoding=inference_pb2.SpeculativeDecoding(
                    steps=2, draft_tokens=8, accepted_tokens=3, mean_acceptance_length=2.5
                ),
            )
        ),
    ]


@pytest.fixture(scope="module")
def store_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real adapter store of its own process, with nothing in it."""
    data = tmp_path_factory.mktemp("store")
    command = [sys.executable, "-m", "loraplex.adapter_store", "--port", "0", "--data", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("ready store=")
            yield ready.split()[1].removeprefix("store=")
        finally:
            process.terminate()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[str]:
    """Run a store in the test's own process; its address."""
    running = Store(StoreSettings(data=tmp_path / "data", port=0))
    await running.start()
    yield f"127.0.0.1:{running.port}"
    await running.stop(drain_s=0)


@pytest.fixture
def adapter_directory(tmp_path: Path) -> Path:
    """Two files of which the hash model's store takes the bytes as they are; the weights are several chunks."""
    directory = tmp_path / "support"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}'
    )
    (directory / "adapter_model.safetensors").write_bytes(random.Random(7).randbytes(1_300_000))
    return directory
