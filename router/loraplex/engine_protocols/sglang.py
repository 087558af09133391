"""SglangScheduler: the engine protocol's calls as requests of this router, through the parts of its own service.

An adapter is known by its name in the store, such as support, support@canary or tenants/acme/adapters/support: that is
its lora_name, its lora_id and its lora_path. So every router knows it, and no file of this machine is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import sglang_scheduler_pb2 as engine
from smg_grpc_proto import sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.generation_config import GENERATION_CONFIG, GenerationConfig
from loraplex.contracts.artifacts.names import SHARED
from loraplex.contracts.broker.commands import Verb
from loraplex.contracts.broker.messages import WorkerState
from loraplex.engine_protocols.block_feed import BlockFeed
from loraplex.engine_protocols.sglang_messages import (
    EngineAnswer,
    KvEventBatches,
    engine_field_names,
    read_embedding,
    read_generate,
    reasoning_end,
)
from loraplex.router.api.cluster import AdapterCommands
from loraplex.router.api.encoding import normalized
from loraplex.router.api.request_telemetry import RequestRecord
from loraplex.router.api.service import InferenceService
from loraplex.router.catalog.models import asking_redis
from loraplex.router.catalog.store_client import Manifest
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.dispatch.relay import RelayService
from loraplex.runtime.rpc.errors import InvalidField, Mismatch, NotBuilt, PositionGone
from loraplex.runtime.rpc.interceptors import Context, Handler, Interceptor, Method, wrapped
from loraplex.runtime.rpc.principal import CredentialKind, caller, calling_tenant, set_caller
from loraplex.runtime.tenancy.permissions import SGLANG_SERVICE

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


def _name(request: Any, others: tuple[str, ...]) -> str:
    """Return the adapter's name, which the `others` repeat where they are set. Raises InvalidField."""
    name: str = request.lora_name
    if not name:
        raise InvalidField("lora_name", "name an adapter of the store")
    for field in others:
        if (other := getattr(request, field)) and other != name:
            message = f"{other!r} is not lora_name ({name!r}): adapters are known by their names in the store"
            raise InvalidField(field, message)
    return name


_SECTIONS = frozenset({"all", "core", "memory", "spec", "lora", "disagg", "queues"})
_CONFIG = "config.json"
_VERSION = f"loraplex {version('loraplex')}"


def model_info(manifest: Manifest, defaults: GenerationConfig, adapter: str) -> Any:
    """Describe a base model, by the name of the adapter that calls without lora_id get, if there is one.

    Gateways fill in `defaults` themselves: the protocol's requests have a value of every field.
    """
    config, generation = _read(manifest, _CONFIG), _read(manifest, GENERATION_CONFIG)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    labels = {str(index): label for index, label in enumerate(manifest.labels)}
    return engine.GetModelInfoResponse(
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


def _load(states: Sequence[WorkerState], queued: int, include: set[str] | frozenset[str]) -> Any:
    """Add up the workers' states; the queue's jobs wait for any of them."""
    running, limit = sum(state.rows_running for state in states), sum(state.rows_limit for state in states)
    waiting = queued + sum(state.rows_waiting for state in states)
    blocks, used = sum(state.blocks_total for state in states), sum(state.blocks_referenced for state in states)
    slots, held = sum(state.slots_total for state in states), sum(state.slots_used for state in states)
    load = engine.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        max_running_requests=limit,
        token_usage=_part(used, blocks),
        utilization=_part(running, limit),
    )
    if include & {"all", "lora"}:
        load.lora.MergeFrom(engine.LoRAMetrics(slots_used=held, slots_total=slots, utilization=_part(held, slots)))
    if include & {"all", "queues"}:
        load.queues.MergeFrom(engine.QueueMetrics(waiting=waiting))
    return load


def _part(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _read(manifest: Manifest, file: str) -> dict[str, Any]:
    try:
        return dict(parse_object(manifest.files.get(file, b"{}"), file))
    except ArtifactError:  # anybody may have written it
        return {}


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _id_of(value: Any) -> int:
    return value if _is_id(value) else 0


class SglangScheduler:
    """Serves sglang.grpc.scheduler.SglangScheduler with the parts of the router's own service.

    `adapter` is that of calls without lora_id; empty: the base model. `waits_for` returns what is missing before
    requests can be served, or nothing.
    """

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
        relay.block_feed = self._block_feed = BlockFeed(relay.links)
        self._began, self._started_at = time.monotonic(), Timestamp()
        self._started_at.GetCurrentTime()
        self._tokenizers = TokenizerFiles()

    def register(self, server: grpc.aio.Server) -> None:
        """Let a server serve the protocol."""
        sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the answer to a request: chunks if it asks for them, then each choice whole."""
        with RequestRecord(self._telemetry, context) as record, engine_field_names():
            call = record.begin(await read_generate(request, record.tenant, self._adapter, self._models, self._prompts))
            end = reasoning_end(self._models.get("").tokenizer) if request.require_reasoning else None
            answer = EngineAnswer(call, tuple(request.tokenized.input_ids), streamed=request.stream, end=end)
            del request  # it may be large, and a stream long
            await self._generation.check_prompt(call)
            async with aclosing(self._generation.run(call, context.time_remaining())) as messages:
                async for message in messages:
                    record.count(message.event)
                    for response in answer.messages_of(message.event):
                        yield response

    async def Embed(self, request: Any, context: Context) -> Any:
        """Return the vector of a text, of length 1."""
        with RequestRecord(self._telemetry, context) as record, engine_field_names():
            call = record.begin(read_embedding(request, record.tenant, self._adapter))
            await self._generation.check_prompt(call)
            (vector,), summary = await self._unary_calls.encode(call, context.time_remaining(), lambda one: one)
            record.count_texts("embed", 1, summary)
            return engine.EmbedResponse(
                embedding=normalized(vector.values),
                embedding_dim=len(vector.values),
                prompt_tokens=vector.prompt_tokens,
            )

    async def Abort(self, request: Any, context: Context) -> Any:
        """End a running request of the caller's tenant."""
        if not request.request_id:
            raise InvalidField("request_id", "name a request")
        aborted = await self._generation.abort(calling_tenant(), request.request_id)
        return engine.AbortResponse(success=aborted, message="" if aborted else "no such request runs at this router")

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Tell whether requests are served, as grpc.health.v1 does."""
        missing = self._waits_for()
        return engine.HealthCheckResponse(healthy=not missing, message=f"waits for {missing}" if missing else "")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        """Describe the base model."""
        model = self._models.get("")
        return model_info(model.manifest, model.generation_config, self._adapter)

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """Describe the router, with the number of the caller's own requests that run."""
        who = caller()
        return engine.GetServerInfoResponse(
            active_requests=sum(who.sees_tenant(own.job.tenant) for own in self._dispatcher.jobs),
            uptime_seconds=time.monotonic() - self._began,
            sglang_version=_VERSION,
            server_type="grpc",
            start_time=self._started_at,
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """Report how busy the workers are, all as one rank."""
        if unknown := sorted(set(request.include) - _SECTIONS):
            raise InvalidField("include", f"{unknown[0]!r} is none of {', '.join(sorted(_SECTIONS))}")
        if request.dp_rank:
            raise InvalidField("dp_rank", f"{request.dp_rank}; there is rank 0 alone")
        model = self._models.get("")
        with asking_redis():
            cells = self._models.reached(model)
            states = [state for cell in cells for state in await cell.liveness.live_workers()]
            waiting = sum([await cell.queue.count_waiting() for cell in cells])
        load = _load(states, waiting, frozenset(request.include) or {"all"})
        return engine.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=_VERSION,
            dp_rank_count=1,
            loads=[load],
            aggregate=engine.AggregateMetrics(
                total_running_reqs=load.num_running_reqs,
                total_waiting_reqs=load.num_waiting_reqs,
                total_reqs=load.num_total_reqs,
                avg_token_usage=load.token_usage,
                avg_utilization=load.utilization,
            ),
        )

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the base model's tokenizer as a zip."""
        async for chunk in self._tokenizers.chunks(self._models.get("").manifest):
            yield chunk

    async def LoadLoRAAdapter(self, request: Any, context: Context) -> Any:
        """Load an adapter of the store on all workers; one that is pinned is kept there."""
        name = _name(request, ("lora_id", "lora_path"))
        await self._commands.send(Verb.PIN if request.pinned else Verb.WARM, calling_tenant(), name, "")
        return engine.LoadLoRAAdapterResponse(success=True, loaded_lora_ids=await self._pinned_ids())

    async def UnloadLoRAAdapter(self, request: Any, context: Context) -> Any:
        """Allow an adapter to be evicted again, which happens when its place is needed."""
        await self._commands.send(Verb.UNPIN, calling_tenant(), _name(request, ("lora_id",)), "")
        return engine.UnloadLoRAAdapterResponse(success=True, loaded_lora_ids=await self._pinned_ids())

    async def ListLoadedLoRAAdapters(self, request: Any, context: Context) -> Any:
        """List the adapters that are kept on all workers and that the caller may see."""
        return engine.ListLoadedLoRAAdaptersResponse(loaded_adapters=await self._pinned())

    async def _pinned_ids(self) -> list[str]:
        return [adapter.lora_id for adapter in await self._pinned()]

    async def _pinned(self) -> list[Any]:
        who, visible = caller(), {}
        with asking_redis():
            cells = [cell for model in self._models.served for cell in self._models.reached(model)]
            pins = [pin for cell in cells for pin in await cell.queue.pins.list()]
        for pin in pins:
            # tenants/{tenant}/adapters/{adapter}/revisions/{digest}
            adapter, _, digest = pin.adapter.revision.rpartition("/revisions/")
            if who.sees_tenant(owner := adapter.split("/")[1]) or owner == SHARED:
                visible[pin.adapter.revision] = engine.LoadedLoRAAdapter(
                    lora_id=f"{adapter}@{digest}", lora_name=adapter, lora_path=pin.adapter.revision, pinned=True
                )
        return [visible[revision] for revision in sorted(visible)]

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
        """Refuse: a block is never served to others than whom it was computed for."""
        raise NotBuilt("FlushCache")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        """Refuse: workers have no profiler."""
        raise NotBuilt("StartProfile")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        """Refuse: workers have no profiler."""
        raise NotBuilt("StopProfile")


class UnnamedCallers(Interceptor):
    """Gives callers without a credential and a name to a tenant. Put it behind the guard, which sets the caller."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Wrap the methods of the engine protocol."""
        return wrapped(handler, self._named) if method.startswith(f"/{SGLANG_SERVICE}/") else handler

    def _named(self, inner: Method) -> Method:
        def named(request: Any, context: Context) -> Any:
            who = caller()
            if who.kind is CredentialKind.HEADER and not who.tenant:
                set_caller(replace(who, name=self._tenant, tenant=self._tenant))
            return inner(request, context)

        return named
