"""Conversion of the engine protocol's requests to Loraplex's own, whose readers check them further.

A number that is 0 stands for what Loraplex takes where it is unset: the protocol's numbers cannot be unset.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from loraplex.inference.v1 import inference_pb2 as pb

from artifacts.sampling import LOGIT_BIASES
from router.api.convert import STOP_STRINGS, STOP_TOKEN_IDS
from router.api.encoding import read_embed
from router.api.prompt_size import check_count
from router.api.read_spec import read_spec
from router.api.sglang.ebnf import read_ebnf
from router.catalog.models import Models
from router.encode_request import EncodeRequest
from router.generation.admission import DEFAULT_MAX_TOKENS
from router.request import Request
from router.text.prompt_encoder import PromptEncoder
from rpc.errors import InvalidField, NotBuilt
from rpc.server import MESSAGE_BYTES

# Fields whose meaning no part of Loraplex has.
_UNSERVED = (
    "mm_inputs",
    "input_embeds",
    "token_ids_logprob",
    "return_hidden_states",
    "custom_logit_processor",
    "disaggregated_params",
)
_UNSERVED_OF_EMBED = ("mm_inputs", "token_type_ids", "is_cross_encoder", "texts")
# Maximum bytes of the message that ends an answer: of its other fields, of a token with its log probability, and of an
# alternative.
_REST_BYTES, _TOKEN_BYTES, _ALTERNATIVE_BYTES = 64 * 1024, 24, 9
_TOO_LARGE = "ANSWER_TOO_LARGE"
# Maximum numbers of values in fields of sampling_params.
_MOST_VALUES = {"logit_bias": LOGIT_BIASES, "stop": STOP_STRINGS, "stop_token_ids": STOP_TOKEN_IDS}


async def read_generate(request: Any, tenant: str, adapter: str, models: Models, encoder: PromptEncoder) -> Request:
    """Return the request in a message; `adapter` is that of a message without lora_id. Raises a CallError."""
    _check_served(request, _UNSERVED)
    ids, params = request.tokenized.input_ids, request.sampling_params
    # Before they are copied, which takes the event loop seconds for a full message.
    check_count("token_ids", ids, models.get("").manifest.context_length)
    for field, most in _MOST_VALUES.items():
        if (count := len(getattr(params, field))) > most:
            raise InvalidField(f"sampling_params.{field}", f"{count} values; at most {most}")
    start = _logprob_start(request)
    if request.top_logprobs_num < 0:
        raise InvalidField("top_logprobs_num", f"{request.top_logprobs_num}; at least 0")
    logprobs = request.top_logprobs_num if request.return_logprob else None
    spec = pb.GenerateSpec(
        # Chunks carry it before Loraplex's own messages do.
        request_id=request.request_id or secrets.token_hex(8),
        adapter=request.lora_id or adapter,
        token_ids=pb.TokenIds(ids=ids),
        sampling=_sampling(params),
        stopping=_stopping(params),
        output=pb.Output(
            n=params.n or 1,
            logprobs=logprobs,
            prompt_logprobs=None if start is None else logprobs,
            skip_special_tokens=params.skip_special_tokens,
            stream_interval=_stream_interval(params),
        ),
    )
    match params.WhichOneof("constraint"):
        case "json_schema":
            spec.json_schema = params.json_schema
        case "regex":
            spec.regex = params.regex
        case "ebnf_grammar":
            spec.grammar = await read_ebnf(params.ebnf_grammar, tenant, encoder)
        case "structural_tag":
            raise NotBuilt("sampling_params.structural_tag")
    read = await read_spec(spec, tenant, models, encoder)
    _check_size(read, 0 if start is None else len(ids) - start)
    # The spec has no such field: two requests that differ in it alone are two.
    fingerprint = f"{read.fingerprint}/{start or 0}"
    return replace(read, keep_stop=True, prompt_logprobs_start=start or 0, fingerprint=fingerprint)


def read_embedding(request: Any, tenant: str, adapter: str) -> EncodeRequest:
    """Return what an Embed call asks for; the protocol's sampling_params mean nothing here. Raises a CallError."""
    _check_served(request, _UNSERVED_OF_EMBED)
    given = pb.EncodeInput(token_ids=pb.TokenIds(ids=request.tokenized.input_ids))
    spec = pb.EncodeSpec(request_id=request.request_id, adapter=adapter, inputs=[given])
    return read_embed(pb.EmbedRequest(spec=spec), tenant)


def _check_served(message: Any, unserved: tuple[str, ...]) -> None:
    given = {field.name for field, _ in message.ListFields()}
    for field in unserved:
        if field in given:
            raise NotBuilt(field)
    if message.data_parallel_rank:
        raise InvalidField("data_parallel_rank", f"{message.data_parallel_rank}; there is rank 0 alone")


def _sampling(params: Any) -> pb.Sampling:
    if params.HasField("custom_params") and params.custom_params.fields:
        raise NotBuilt("sampling_params.custom_params")
    if params.top_k < -1:
        raise InvalidField("sampling_params.top_k", f"{params.top_k}; at least 1, or -1 for no limit")
    return pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p or None,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or None,
        logit_bias={_token_id(key): bias for key, bias in params.logit_bias.items()},
    )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise InvalidField("sampling_params.logit_bias", f"{key[:20]!r} is not a token id")
    return int(key)


def _stopping(params: Any) -> pb.Stopping:
    return pb.Stopping(
        max_tokens=params.max_new_tokens if params.HasField("max_new_tokens") else None,
        min_tokens=params.min_new_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def _stream_interval(params: Any) -> int | None:
    if not params.HasField("stream_interval"):
        return None
    if params.stream_interval < 0:
        raise InvalidField("sampling_params.stream_interval", f"{params.stream_interval}; at least 0")
    return int(params.stream_interval)


def _logprob_start(request: Any) -> int | None:
    """Return the first prompt token whose log probabilities are wanted; None: those of no one."""
    start, count = request.logprob_start_len, len(request.tokenized.input_ids)
    if not request.return_logprob or start == -1:
        return None
    if not 0 <= start < max(1, count):
        raise InvalidField("logprob_start_len", f"{start} of {count} tokens; -1 for none of the prompt's")
    return int(start)


def _check_size(request: Request, prompt: int) -> None:
    """Raise InvalidField where the log probabilities of the answer, and of `prompt` tokens, do not fit one message."""
    if request.logprobs is None:
        return
    asked = request.stopping.max_tokens
    tokens = prompt + (DEFAULT_MAX_TOKENS if asked is None else asked)
    most = ((MESSAGE_BYTES - _REST_BYTES) // max(1, tokens) - _TOKEN_BYTES) // _ALTERNATIVE_BYTES
    if request.logprobs > most:
        message = f"{request.logprobs} for each of {tokens} tokens do not fit a message"
        hint = f"at most {most} do" if most >= 0 else "leave return_logprob out"
        raise InvalidField("top_logprobs_num", f"{message}; {hint}", reason=_TOO_LARGE)
