"""What the services of engine protocols have alike, through the parts of the router's own service.

An adapter is known by its name in the store, such as support, support@canary or tenants/acme/adapters/support. So every
router knows it, and no file of this machine is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto.generated import common_pb2 as common

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.generation_config import GENERATION_CONFIG, GenerationConfig
from loraplex.contracts.broker.messages import WorkerState
from loraplex.engine_protocols.answers import EngineAnswer, KvEventBatches, made
from loraplex.engine_protocols.block_feed import BlockFeed
from loraplex.engine_protocols.sglang_messages import engine_field_names, read_embedding
from loraplex.router.api.cluster import AdapterCommands
from loraplex.router.api.encoding import normalized
from loraplex.router.api.request_telemetry import RequestRecord
from loraplex.router.api.service import InferenceService
from loraplex.router.catalog.models import asking_redis
from loraplex.router.catalog.store_client import Manifest
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.relay import RelayService
from loraplex.router.request import Request
from loraplex.runtime.rpc.errors import InvalidField, Mismatch, NotBuilt, PositionGone
from loraplex.runtime.rpc.interceptors import Context, Handler, Interceptor, Method, wrapped
from loraplex.runtime.rpc.principal import CredentialKind, caller, set_caller
from loraplex.runtime.tenancy.permissions import ENGINE_SERVICES

TOKENIZER_FILE = "tokenizer.json"
# Bytes of a message's part of the zip, as other engines of this protocol send.
_CHUNK_BYTES = 64 * 1024


class TokenizerFiles:
    """Makes the zips, and keeps the last one: a router has few models."""

    def __init__(self) -> None:
        # The digest of a model, its zip, and the zip's sha256; one is made at a time.
        self._archive = ("", b"", "")
        self._making = asyncio.Lock()

    async def chunks(self, manifest: Manifest) -> AsyncIterator[Any]:
        """Yield the zip in parts, its sha256 with the last. Raises Mismatch for a model without a tokenizer."""
        if TOKENIZER_FILE not in manifest.files:
            message = f"the model has no {TOKENIZER_FILE}; give the gateway a tokenizer of its own"
            raise Mismatch(manifest.name, message, reason="NO_TOKENIZER")
        async with self._making:
            if self._archive[0] != manifest.digest:
                # In a thread: large vocabularies take a second.
                self._archive = (manifest.digest, *await asyncio.to_thread(_zipped, manifest.files))
            _, whole, sha256 = self._archive
        for start in range(0, len(whole), _CHUNK_BYTES):
            last = start + _CHUNK_BYTES >= len(whole)
            yield common.GetTokenizerChunk(data=whole[start : start + _CHUNK_BYTES], sha256=sha256 if last else "")


def _zipped(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return a zip that is the same for the same files, and its sha256."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, files[name])
    return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()


_CONFIG = "config.json"
VERSION = f"loraplex {version('loraplex')}"


def model_info(messages: Any, manifest: Manifest, defaults: GenerationConfig, adapter: str) -> Any:
    """Describe a base model, by the name of the adapter that calls without one get, if there is such.

    Gateways fill in `defaults` themselves: the protocol's requests have a value of every field.
    """
    config, generation = _read(manifest, _CONFIG), _read(manifest, GENERATION_CONFIG)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    labels = {str(index): label for index, label in enumerate(manifest.labels)}
    return made(
        messages.GetModelInfoResponse,
        # No name of a public model, whose tokenizer gateways would fetch. They ask GetTokenizer for that of a path that
        # they do not have, and take one of their own where there is none.
        model_path=f"/loraplex/{manifest.digest}" if TOKENIZER_FILE in manifest.files else "",
        served_model_name=adapter or manifest.name,
        is_generation="generate" in manifest.tasks,
        weight_version=manifest.digest,
        max_context_length=manifest.context_length,
        max_req_input_len=manifest.context_length,
        vocab_size=manifest.vocab_size,
        model_type=str(config.get("model_type") or ""),
        architectures=[manifest.architecture],
        eos_token_ids=[one for one in (eos if isinstance(eos, list) else [eos]) if _is_id(one)],
        pad_token_id=_id_of(config.get("pad_token_id")),
        bos_token_id=_id_of(config.get("bos_token_id")),
        id2label_json=json.dumps(labels) if labels else "",
        num_labels=len(labels),
        default_sampling_params_json=json.dumps(defaults.sampling) if defaults.sampling else "",
    )


def _read(manifest: Manifest, file: str) -> dict[str, Any]:
    try:
        return dict(parse_object(manifest.files.get(file, b"{}"), file))
    except ArtifactError:  # anybody may have written it
        return {}


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _id_of(value: Any) -> int:
    return value if _is_id(value) else 0


def _load(messages: Any, states: Sequence[WorkerState], queued: int, include: set[str] | frozenset[str]) -> Any:
    """Add up the workers' states; the queue's jobs wait for any of them."""
    running, limit = sum(state.rows_running for state in states), sum(state.rows_limit for state in states)
    waiting = queued + sum(state.rows_waiting for state in states)
    blocks, used = sum(state.blocks_total for state in states), sum(state.blocks_referenced for state in states)
    slots, held = sum(state.slots_total for state in states), sum(state.slots_used for state in states)
    load = messages.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        max_running_requests=limit,
        token_usage=_part(used, blocks),
        utilization=_part(running, limit),
    )
    if include & {"all", "lora"}:
        load.lora.MergeFrom(messages.LoRAMetrics(slots_used=held, slots_total=slots, utilization=_part(held, slots)))
    if include & {"all", "queues"}:
        load.queues.MergeFrom(messages.QueueMetrics(waiting=waiting))
    return load


def _part(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


class UnnamedCallers(Interceptor):
    """Gives callers without a credential and a name to a tenant. Put it behind the guard, which sets the caller."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap the methods of the engine protocols."""
        return wrapped(handler, self._named) if method.split("/")[1] in ENGINE_SERVICES else handler

    def _named(self, inner: Method) -> Method:
        def named(request: Any, context: Context) -> Any:
            who = caller()
            if who.kind is CredentialKind.HEADER and not who.tenant:
                set_caller(replace(who, name=self._tenant, tenant=self._tenant))
            return inner(request, context)

        return named


class EngineService:
    """What the services of these protocols have alike.

    Of a protocol: `messages` is the module of its classes of messages, `names` those of engine_field_names, `sections`
    what GetLoads may be asked for.

    `adapter` is that of calls that name none; empty: the base model. `waits_for` returns what is missing before
    requests can be served, or nothing.
    """

    callers = UnnamedCallers
    messages: Any
    names: Mapping[str, str]
    sections: frozenset[str]

    def __init__(
        self,
        inference: InferenceService,
        dispatcher: Dispatcher,
        commands: AdapterCommands,
        relay: RelayService,
        adapter: str,
        waits_for: Callable[[], str],
    ) -> None:
        self._telemetry, self._prompts = inference.telemetry, inference.prompts
        self._generation, self._unary_calls = inference.generation, inference.unary_calls
        self._dispatcher = dispatcher
        self._models = inference.models
        self._adapter = adapter
        self._waits_for = waits_for
        self._commands = commands
        if relay.block_feed is None:  # two protocols of a router follow the blocks once
            relay.block_feed = BlockFeed(relay.links)
        self._block_feed: Any = relay.block_feed
        self._began, self._started_at = time.monotonic(), Timestamp()
        self._started_at.GetCurrentTime()
        self._tokenizers = TokenizerFiles()

    async def _stream(
        self, record: RequestRecord, call: Request, answer: EngineAnswer, context: Context
    ) -> AsyncGenerator[Any, None]:
        """Run a request, and yield its answer's messages."""
        await self._generation.check_prompt(call)
        async with aclosing(self._generation.run(call, context.time_remaining())) as messages:
            async for message in messages:
                record.count(message.event)
                for response in answer.messages_of(message.event):
                    yield response

    async def Embed(self, request: Any, context: Context) -> Any:
        """Return the vector of a text, of length 1."""
        with RequestRecord(self._telemetry, context) as record, engine_field_names(self.names):
            call = record.begin(read_embedding(request, record.tenant, self._adapter))
            await self._generation.check_prompt(call)
            (vector,), summary = await self._unary_calls.encode(call, context.time_remaining(), lambda one: one)
            record.count_texts("embed", 1, summary)
            return self.messages.EmbedResponse(
                embedding=normalized(vector.values),
                embedding_dim=len(vector.values),
                prompt_tokens=vector.prompt_tokens,
            )

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Tell whether requests are served, as grpc.health.v1 does."""
        missing = self._waits_for()
        return self.messages.HealthCheckResponse(healthy=not missing, message=f"waits for {missing}" if missing else "")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """Describe the base model."""
        model = self._models.get("")
        return model_info(self.messages, model.manifest, model.generation_config, self._adapter)

    def _active_requests(self) -> int:
        """Return the number of the caller's own requests that run."""
        who = caller()
        return sum(who.sees_tenant(own.job.tenant) for own in self._dispatcher.jobs)

    async def _workers(self) -> tuple[list[WorkerState], int]:
        """Return the states of the live workers, and the number of jobs that wait for any of them."""
        with asking_redis():
            cells = self._models.reached(self._models.get(""))
            states = [state for cell in cells for state in await cell.liveness.live_workers()]
            return states, sum([await cell.queue.count_waiting() for cell in cells])

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """Report how busy the workers are, all as one rank."""
        if unknown := sorted(set(request.include) - self.sections):
            raise InvalidField("include", f"{unknown[0]!r} is not one of {', '.join(sorted(self.sections))}")
        if request.dp_rank:
            raise InvalidField("dp_rank", f"{request.dp_rank}; there is rank 0 alone")
        load = _load(self.messages, *await self._workers(), frozenset(request.include) or {"all"})
        kind = self.messages.GetLoadsResponse
        response = made(kind, timestamp=datetime.now(UTC).isoformat(), version=VERSION, dp_rank_count=1, loads=[load])
        if "aggregate" in kind.DESCRIPTOR.fields_by_name:
            response.aggregate.total_running_reqs = load.num_running_reqs
            response.aggregate.total_waiting_reqs = load.num_waiting_reqs
            response.aggregate.total_reqs = load.num_total_reqs
            response.aggregate.avg_token_usage = load.token_usage
            response.aggregate.avg_utilization = load.utilization
        return response

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the base model's tokenizer as a zip."""
        async for chunk in self._tokenizers.chunks(self._models.get("").manifest):
            yield chunk

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the blocks of the workers' prefix caches that the caller may see, and then every change."""
        if request.start_sequence_number:
            message = "no history is kept: give 0, for all blocks that there are now"
            raise PositionGone("start_sequence_number", f"{request.start_sequence_number}: {message}")
        subscription = self._block_feed.subscribe(self._models.get("").manifest.digest, caller().sees_tenant)
        try:
            batches = KvEventBatches()
            for batch in batches.snapshot(await self._block_feed.blocks_of(subscription)):
                yield batch
            while True:
                yield batches.changes(await subscription.next_events())
        finally:
            self._block_feed.unsubscribe(subscription)

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """Refuse: blocks are never shared between tenants, so nothing must be flushed."""
        raise NotBuilt("FlushCache")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        """Refuse: workers have no profiler."""
        raise NotBuilt("StartProfile")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        """Refuse: workers have no profiler."""
        raise NotBuilt("StopProfile")
