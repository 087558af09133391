"""VllmEngine: the calls of vLLM's engine protocol as requests of this router.

Its requests name no adapter: all get the one of --engine-adapter, or the base model. A number that is 0 stands for what
Loraplex takes where it is unset; an unset temperature is the model's or 1, and unset max_tokens end with the context.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
from loraplex.inference.v1 import inference_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2 as engine
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from loraplex.contracts.options import LOGIT_BIASES
from loraplex.engine_protocols.answers import EngineAnswer
from loraplex.engine_protocols.engine_service import EngineService
from loraplex.engine_protocols.picker_metrics import PickerMetrics
from loraplex.engine_protocols.sglang_messages import check_served, check_size, engine_field_names, read_ebnf
from loraplex.router.api.convert import STOP_STRINGS, STOP_TOKEN_IDS, check_count, check_most, read_spec
from loraplex.router.api.request_telemetry import RequestRecord
from loraplex.router.catalog.models import Models
from loraplex.router.request import Request
from loraplex.router.text.tokenizer import PromptTokenizer
from loraplex.runtime.rpc.errors import InvalidField, NotBuilt
from loraplex.runtime.rpc.interceptors import Context
from loraplex.runtime.rpc.principal import calling_tenant

_PARAMS = "sampling_params"
# As sglang_messages.NAMES.
NAMES = {
    "inputs[0].token_ids": "tokenized.input_ids",
    "inputs": "tokenized.input_ids",
    "input": "tokenized.input_ids",
    "token_ids": "tokenized.input_ids",
    "output.best_of": f"{_PARAMS}.n",
    "choices.values": f"{_PARAMS}.choice.choices",
    "choices": f"{_PARAMS}.choice",
    **dict.fromkeys(("stopping", "sampling", "output"), _PARAMS),
    **{name: f"{_PARAMS}.{name}" for name in ("json_schema", "regex", "grammar")},
}
# Fields whose meaning no part of Loraplex has.
_UNSERVED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "extra_mm_inputs", "media_refs")
# Maximum numbers of values in fields of sampling_params, and of the ids of an Abort call.
_MOST_VALUES = {"logit_bias": LOGIT_BIASES, "stop": STOP_STRINGS, "stop_token_ids": STOP_TOKEN_IDS}
_ABORTED_AT_ONCE = 1_024
# The schema that json_object stands for.
_ANY_OBJECT = '{"type": "object"}'


async def read_generate(
    request: Any, tenant: str, adapter: str, models: Models, prompts: PromptTokenizer
) -> tuple[Request, tuple[int, ...]]:
    """Return the request in a message, and the ids of its prompt. Raises a CallError."""
    check_served(request, _UNSERVED)
    params, context = request.sampling_params, models.get("").manifest.context_length
    for field, most in _MOST_VALUES.items():
        check_most(f"{_PARAMS}.{field}", len(getattr(params, field)), most, "values")
    ids = await _prompt_ids(request, tenant, models, prompts)
    spec = pb.GenerateSpec(
        request_id=request.request_id or secrets.token_hex(8),
        adapter=adapter,
        token_ids=pb.TokenIds(ids=ids),
        sampling=_sampling(params),
        stopping=pb.Stopping(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            default_max_tokens=context,
            min_tokens=params.min_tokens,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        ),
        output=pb.Output(
            n=params.n or 1,
            logprobs=_optional(params, "logprobs"),
            prompt_logprobs=_optional(params, "prompt_logprobs"),
            skip_special_tokens=params.skip_special_tokens,
        ),
    )
    await _read_constraint(params, spec, tenant, prompts)
    read = await read_spec(spec, tenant, models, prompts)
    check_size(read, 0 if read.prompt_logprobs is None else len(ids), max(1, context - len(ids)))
    return replace(read, keep_stop=True), ids


async def _prompt_ids(request: Any, tenant: str, models: Models, prompts: PromptTokenizer) -> tuple[int, ...]:
    """Return the ids of a prompt, which may be a text; truncate_prompt_tokens keeps the last ones."""
    model, keep = models.get(""), None
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        keep = request.sampling_params.truncate_prompt_tokens
        if keep < 1:
            raise InvalidField(f"{_PARAMS}.truncate_prompt_tokens", f"{keep}; at least 1")
    given, context = request.tokenized.input_ids, model.manifest.context_length
    if request.WhichOneof("input") == "text":
        given = await prompts.tokenize(model.tokenizer, request.text, "text", tenant, context)
    elif keep is None:  # before they are copied, which takes the event loop seconds for a full message
        check_count("token_ids", given, context)
    return tuple(given[-keep:] if keep else given)


def _sampling(params: Any) -> pb.Sampling:
    for token in params.logit_bias:
        if token < 0:
            raise InvalidField(f"{_PARAMS}.logit_bias", f"{token} is not a token id")
    return pb.Sampling(
        temperature=params.temperature if params.HasField("temperature") else None,
        default_temperature=1.0,
        top_p=params.top_p or None,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or None,
        logit_bias=dict(params.logit_bias),
        seed=_optional(params, "seed"),
    )


def _optional(params: Any, field: str) -> int | None:
    """Return a whole number from 0; None where it is unset."""
    if not params.HasField(field):
        return None
    if (value := getattr(params, field)) < 0:
        raise InvalidField(f"{_PARAMS}.{field}", f"{value}; at least 0")
    return int(value)


async def _read_constraint(params: Any, spec: pb.GenerateSpec, tenant: str, prompts: PromptTokenizer) -> None:
    """Set the format of a spec. Raises a CallError."""
    match params.WhichOneof("constraint"):
        case "json_schema":
            spec.json_schema = params.json_schema
        case "json_object" if params.json_object:
            spec.json_schema = _ANY_OBJECT
        case "regex":
            spec.regex = params.regex
        case "grammar":  # EBNF, or as it is in Lark's syntax: vLLM takes both
            is_ebnf = "::=" in params.grammar
            spec.grammar = await read_ebnf(params.grammar, tenant, prompts) if is_ebnf else params.grammar
        case "choice":
            spec.choices.values.extend(params.choice.choices)
        case "structural_tag":
            raise NotBuilt(f"{_PARAMS}.structural_tag")


class VllmEngine(EngineService):
    """Serves vllm.grpc.engine.VllmEngine, and the gauges that endpoint pickers read at vLLM."""

    messages, names = engine, NAMES
    sections = frozenset({"all", "core"})

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        metrics = self._telemetry.metrics
        metrics.registry.register(PickerMetrics(self._models, self._dispatcher, metrics))

    def register(self, server: grpc.aio.Server) -> None:
        """Let a server serve the protocol."""
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Stream the answer to a request: chunks if it asks for them, then each choice whole."""
        with RequestRecord(self._telemetry, context) as record, engine_field_names(NAMES):
            read, ids = await read_generate(request, record.tenant, self._adapter, self._models, self._prompts)
            call = record.begin(read)
            answer = EngineAnswer(engine, call, ids, streamed=request.stream)
            del request  # it may be large, and a stream long
            async with aclosing(self._stream(record, call, answer, context)) as responses:
                async for response in responses:
                    yield response

    async def Abort(self, request: Any, context: Context) -> Any:
        """End running requests of the caller's tenant; the others are not mentioned."""
        if not request.request_ids:
            raise InvalidField("request_ids", "name a request")
        check_most("request_ids", len(request.request_ids), _ABORTED_AT_ONCE, "values")
        for request_id in request.request_ids:
            await self._generation.abort(calling_tenant(), request_id)
        return engine.AbortResponse()

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        """Describe the router, with the number of the caller's own requests that run."""
        name = self._models.get("").manifest.name
        return engine.GetServerInfoResponse(
            active_requests=self._active_requests(),
            last_receive_timestamp=time.time(),
            uptime_seconds=time.monotonic() - self._began,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=sum(state.rows_limit for state in self._models.workers(name)),
            constrained_decoding_start="first_token",
        )
