"""The requests of sglang's protocol as this router's own; answers.py has the answers.

A number that is 0 stands for what Loraplex takes where it is unset: the protocol's numbers cannot be unset.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.contracts.artifacts.chat_formats import REASONING
from loraplex.contracts.options import LOGIT_BIASES
from loraplex.router.api.convert import STOP_STRINGS, STOP_TOKEN_IDS, check_count, check_most, read_spec
from loraplex.router.api.encoding import read_embed
from loraplex.router.catalog.models import Models
from loraplex.router.generation.chat_format import behind_open_block
from loraplex.router.request import DEFAULT_MAX_TOKENS, EncodeRequest, Request
from loraplex.router.text.tokenizer import ModelTokenizer, PromptTokenizer
from loraplex.runtime.rpc.errors import InvalidField, NotBuilt
from loraplex.runtime.rpc.server import MESSAGE_BYTES

_PARAMS = "sampling_params"
# Names of fields by the beginning of the path in loraplex.inference.v1; the first one that fits.
NAMES = {
    "inputs[0].token_ids": "tokenized.input_ids",
    "inputs": "tokenized.input_ids",
    "input": "tokenized.input_ids",
    "token_ids": "tokenized.input_ids",
    "prompt": "tokenized.input_ids",
    "adapter": "lora_id",
    "stopping.max_tokens": f"{_PARAMS}.max_new_tokens",
    "stopping.min_tokens": f"{_PARAMS}.min_new_tokens",
    "stopping": _PARAMS,
    "sampling": _PARAMS,
    "output.logprobs": "top_logprobs_num",
    "output.prompt_logprobs": "top_logprobs_num",
    "output.best_of": f"{_PARAMS}.n",
    "output": _PARAMS,
    "json_schema": f"{_PARAMS}.json_schema",
    "regex": f"{_PARAMS}.regex",
    "grammar": f"{_PARAMS}.ebnf_grammar",
}


@contextmanager
def engine_field_names(names: Mapping[str, str] = NAMES) -> Iterator[None]:
    """Raise an InvalidField of Loraplex's own messages as one of the engine protocol's, by its `names`."""
    try:
        yield
    except InvalidField as error:
        message = error.message.removeprefix(f"{error.field}: ")
        raise InvalidField(_renamed(error.field, names), message, reason=error.reason) from error


def _renamed(field: str, names: Mapping[str, str]) -> str:
    for path, name in names.items():
        if field == path or field.startswith((f"{path}.", f"{path}[")):
            return name + field[len(path) :]
    return field


# Maximum bytes of a grammar: llguidance's converter takes 0.2 s for 500 rules, and four times as long for 1,000.
EBNF_BYTES = 8 * 1024
# Maximum length of a grammar that is converted on the event loop, in 5 milliseconds.
_SHORT_CHARACTERS = 1_024


async def read_ebnf(ebnf: str, tenant: str, prompts: PromptTokenizer) -> str:
    """Return a grammar in llguidance's syntax; a large one is converted in a thread, at the tenant's turn.

    Raises InvalidField, naming `grammar`.
    """
    return await prompts.in_turn(tenant, partial(lark_of, ebnf)) if len(ebnf) > _SHORT_CHARACTERS else lark_of(ebnf)


def lark_of(ebnf: str) -> str:
    """Return a grammar in llguidance's syntax. Raises InvalidField, naming `grammar`."""
    # Imported for such a request alone.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if (size := len(ebnf.encode())) > EBNF_BYTES:
        raise InvalidField("grammar", f"{size} bytes; at most {EBNF_BYTES}", reason="INVALID_FORMAT")
    try:
        return str(gbnf_to_lark(ebnf)).removeprefix("%llguidance {}\n")
    except Exception as error:  # it raises what its own code happens to
        message = f"not a grammar in EBNF: {str(error) or type(error).__name__}"
        raise InvalidField("grammar", message, reason="INVALID_FORMAT") from error


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


async def read_generate(request: Any, tenant: str, adapter: str, models: Models, prompts: PromptTokenizer) -> Request:
    """Return the request in a message; `adapter` is that of a message without lora_id. Raises a CallError."""
    check_served(request, _UNSERVED)
    ids, params = request.tokenized.input_ids, request.sampling_params
    # Before they are copied, which takes the event loop seconds for a full message.
    check_count("token_ids", ids, models.get("").manifest.context_length)
    for field, most in _MOST_VALUES.items():
        check_most(f"sampling_params.{field}", len(getattr(params, field)), most, "values")
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
            spec.grammar = await read_ebnf(params.ebnf_grammar, tenant, prompts)
        case "structural_tag":
            raise NotBuilt("sampling_params.structural_tag")
    read = await read_spec(spec, tenant, models, prompts)
    check_size(read, 0 if start is None else len(ids) - start, models.get("").default_max_tokens(DEFAULT_MAX_TOKENS))
    if request.require_reasoning and read.grammar:
        tokenizer = models.get("").tokenizer
        end = reasoning_end(tokenizer)
        mark = tokenizer.decode([end], skip_special_tokens=False)
        read = replace(read, grammar=behind_open_block(mark, end, read.grammar))
    # The spec has no such fields: two requests that differ in them alone are two.
    fingerprint = f"{read.fingerprint}/{start or 0}/{request.require_reasoning}"
    return replace(read, keep_stop=True, prompt_logprobs_start=start or 0, fingerprint=fingerprint)


def read_embedding(request: Any, tenant: str, adapter: str) -> EncodeRequest:
    """Return what an Embed call asks for; the protocol's sampling_params mean nothing here. Raises a CallError."""
    check_served(request, _UNSERVED_OF_EMBED)
    prompt = pb.EncodeInput(token_ids=pb.TokenIds(ids=request.tokenized.input_ids))
    spec = pb.EncodeSpec(request_id=request.request_id, adapter=adapter, inputs=[prompt])
    return read_embed(pb.EmbedRequest(spec=spec), tenant)


def check_served(message: Any, unserved: tuple[str, ...]) -> None:
    """Raise NotBuilt for a field that is set and not served, InvalidField for another rank than 0."""
    set_fields = {field.name for field, _ in message.ListFields()}
    for field in unserved:
        if field in set_fields:
            raise NotBuilt(field)
    if getattr(message, "data_parallel_rank", 0):
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


def check_size(request: Request, prompt: int, default_max_tokens: int) -> None:
    """Raise InvalidField where the log probabilities of the answer, and of `prompt` tokens, do not fit one message."""
    if request.logprobs is None:
        return
    asked = request.stopping.max_tokens
    tokens = prompt + (default_max_tokens if asked is None else asked)
    most = ((MESSAGE_BYTES - _REST_BYTES) // max(1, tokens) - _TOKEN_BYTES) // _ALTERNATIVE_BYTES
    if request.logprobs > most:
        message = f"{request.logprobs} for each of {tokens} tokens do not fit a message"
        hint = f"at most {most} do" if most >= 0 else "leave log probabilities out"
        raise InvalidField("output.logprobs", f"{message}; {hint}", reason=_TOO_LARGE)


def reasoning_end(tokenizer: ModelTokenizer) -> int:
    """Return the token that ends a model's reasoning. Raises NotBuilt for a model that has none."""
    source = tokenizer.chat.source
    # What the template shows comes first, and what stands in every answer, as gpt-oss's channels do, last.
    for form in sorted(REASONING, key=lambda one: (not one.is_shown(source), one.anywhere)):
        try:
            ids = tokenizer.tokenize(form.closes, special_tokens=False)
        except InvalidField:  # a model without a tokenizer
            break
        if len(ids) == 1:
            return ids[0]
    raise NotBuilt("require_reasoning")
