"""Reports that a gateway asks an engine for, about the whole cluster: its model, its server, and how busy it is."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import sglang_scheduler_pb2 as engine

from artifacts.errors import ArtifactError
from artifacts.json_object import parse_object
from broker.connection import REDIS_DOWN
from broker.worker_state import WorkerState
from router.api.sglang.tokenizer_files import TOKENIZER_FILE
from router.catalog.manifest import Manifest
from router.catalog.models import Models, ServedModel
from rpc.errors import InvalidField, Unavailable

_SECTIONS = frozenset({"all", "core", "memory", "spec", "lora", "disagg", "queues"})
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_VERSION = f"loraplex {version('loraplex')}"


def model_info(manifest: Manifest, adapter: str) -> Any:
    """Describe a base model, by the name of the adapter that calls without lora_id get, if there is one."""
    config, generation = _read(manifest, _CONFIG), _read(manifest, _GENERATION)
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
    )


class ServerReports:
    """Reports of one router about itself and the workers of its model."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._began = time.monotonic()
        self._started_at = Timestamp()
        self._started_at.GetCurrentTime()

    def server_info(self, active_requests: int) -> Any:
        """Describe the router; `active_requests` are those that the caller may know of."""
        return engine.GetServerInfoResponse(
            active_requests=active_requests,
            uptime_seconds=time.monotonic() - self._began,
            sglang_version=_VERSION,
            server_type="grpc",
            start_time=self._started_at,
        )

    async def loads(self, request: Any) -> Any:
        """Return how busy the workers are, all as one rank. Raises InvalidField or Unavailable."""
        if unknown := sorted(set(request.include) - _SECTIONS):
            raise InvalidField("include", f"{unknown[0]!r} is none of {', '.join(sorted(_SECTIONS))}")
        if request.dp_rank:
            raise InvalidField("dp_rank", f"{request.dp_rank}; there is rank 0 alone")
        model = self._models.get("")
        load = _load(await self._models.living(model), await _waiting(model), frozenset(request.include) or {"all"})
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


async def _waiting(model: ServedModel) -> int:
    try:
        return await model.queue.count_waiting()
    except REDIS_DOWN as error:
        raise Unavailable("Redis does not answer", reason="QUEUE_DOWN") from error


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
