"""Options of a generation, and the request made from them."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from loraplex.inference.v1 import inference_pb2

from loraplex_client.chat import CHAT_OPTIONS, ChatMessages, Tools, chat_of
from loraplex_client.errors import AnswerFormatError, InvalidRequestError, unknown_keyword
from loraplex_client.generation import FinishReason, Generation

M = TypeVar("M")

_ANY_OBJECT = {"type": "object"}
# The words of a style, as a field of JsonStyle and its value.
_STYLES = {
    "spaced": ("whitespace", inference_pb2.JSON_WHITESPACE_SPACED),
    "compact": ("whitespace", inference_pb2.JSON_WHITESPACE_COMPACT),
    "flexible": ("whitespace", inference_pb2.JSON_WHITESPACE_FLEXIBLE),
    "schema": ("property_order", inference_pb2.PROPERTY_ORDER_SCHEMA),
    "sorted": ("property_order", inference_pb2.PROPERTY_ORDER_SORTED),
}
F = TypeVar("F", bound=Callable[..., Any])


def schema_of(response_format: Any) -> str:
    """Return the JSON schema of a format. Raises InvalidRequestError where there is none.

    A format is a pydantic model, a type that pydantic knows, a schema, or one of these as a value of `schema` (in
    `json_schema` or not), as OpenAI's and LoRAX's clients write it; a type `json_object` alone is any object.
    """
    if isinstance(response_format, str):
        return response_format
    if isinstance(response_format, Mapping):
        schema = _unwrapped(response_format)
        return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    if hasattr(response_format, "model_json_schema"):
        return json.dumps(response_format.model_json_schema(), ensure_ascii=False)
    return json.dumps(_adapter_of(response_format).json_schema(), ensure_ascii=False)


def style_of(words: str | Sequence[str]) -> inference_pb2.JsonStyle:
    """Return the style of JSON that words stand for. Raises InvalidRequestError."""
    style = inference_pb2.JsonStyle()
    for word in (words,) if isinstance(words, str) else words:
        if word not in _STYLES:
            raise InvalidRequestError(f"json_style: {word!r} is not one of {', '.join(_STYLES)}", field="json_style")
        field, value = _STYLES[word]
        if getattr(style, field) not in (0, value):
            raise InvalidRequestError(f"json_style: {word!r} contradicts another word", field="json_style")
        setattr(style, field, value)
    return style


# Beginnings of the message about an answer that does not match its format, where it did not end by itself.
_CUTS = {
    FinishReason.LENGTH: "the answer was cut at max_tokens and",
    FinishReason.STOP: "the answer was cut at a stop string or token and",
    FinishReason.CONTENT_FILTER: "the answer was cut by the cluster's content hook and",
}


def parse_answer(generation: Generation, response_format: Any) -> Generation:
    """Return an answer with its `parsed` object; one with calls of tools has none. Raises AnswerFormatError."""
    if response_format is None or generation.tool_calls:
        return generation
    try:
        return dataclasses.replace(generation, parsed=_parsed(generation.text, response_format))
    except ValueError as error:  # pydantic's and json's errors are such
        raise AnswerFormatError(
            f"{_CUTS.get(generation.finish_reason, 'the answer')} does not match response_format: {error}",
            text=generation.text,
        ) from error


def _unwrapped(form: Mapping[str, Any]) -> Any:
    if form.get("type") not in ("json_object", "json_schema"):
        return form
    inner = form.get("json_schema", form)
    return inner.get("schema", _ANY_OBJECT) if isinstance(inner, Mapping) else inner


def _parsed(text: str, response_format: Any) -> Any:
    if isinstance(response_format, (str, Mapping)):
        return json.loads(text)
    if hasattr(response_format, "model_validate_json"):
        return response_format.model_validate_json(text)
    return _adapter_of(response_format).validate_json(text)


def _adapter_of(kind: Any) -> Any:
    try:
        from pydantic import TypeAdapter
    except ImportError:
        raise InvalidRequestError(
            "response_format: a type needs pydantic, which is not installed; give a JSON schema",
            field="response_format",
        ) from None
    try:
        return TypeAdapter(kind)
    except Exception as error:  # pydantic has several
        raise InvalidRequestError(
            f"response_format: pydantic knows no schema of {kind!r}", field="response_format"
        ) from error


class ChatOptions(TypedDict, total=False):
    """The keywords of `chat` and `chat_stream`. The server chooses values that are left out or None."""

    # Of a chat: functions that the model may call, and whether it does: `auto`, `none`, `required`, or {"name": ...}.
    tools: Tools | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    # the answer goes on with the last message, which is the assistant's
    continue_final_message: bool | None
    add_generation_prompt: bool | None
    # further variables of the chat template, for example {"enable_thinking": False}
    template_args: Mapping[str, Any] | None
    # maximum tokens of reasoning, after which the answer begins; -1: no limit
    thinking_token_budget: int | None

    # of texts: with the tokens that the tokenizer adds; with the texts of special tokens read as these
    add_special_tokens: bool | None
    parse_special_tokens: bool | None
    # cuts a longer prompt from the left; 0: to what the context leaves
    truncate_prompt_tokens: int | None

    # `support`, `support@canary`, `tenants/acme/adapters/support`, ...; none: the plain base model
    adapter_id: str | None
    # the base model answers where the prompt does not invoke an activated adapter; see Generation.activated
    allow_inactive: bool | None
    # instead of one adapter: the weighted sum of several, as {name: weight} or (name, weight) pairs
    adapters: Mapping[str, float] | Sequence[tuple[str, float]] | None
    # the base model; may be left out where the router serves one
    model: str | None
    # unique within the tenant
    request_id: str | None
    # higher goes first among one tenant's own requests; -100 to 100
    priority: int | None
    # the conversation or user, whose requests get the same revision while another is rolled out
    session_id: str | None
    # whether workers may draft tokens, which changes no answer: `auto`, `off`
    speculation: str | None

    # 0: greedy; unset, as the fields after it: the model's own, else greedy
    temperature: float | None
    # the temperature where it is unset and the model has none either
    default_temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_n_sigma: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    # only these tokens can come, and the end token only if it is among them
    allowed_token_ids: Sequence[int] | None
    # texts that the answer cannot have
    bad_words: str | Sequence[str] | None
    seed: int | None

    # unset: the adapter's own, the model's, else 128
    max_tokens: int | None
    # in place of 128; the context is the bound
    default_max_tokens: int | None
    cap_max_tokens: bool | None
    min_tokens: int | None
    # ends the answer before the string
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    # the answer has the stop string that ends it
    keep_stop: bool | None

    n: int | None
    best_of: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    # in place of logprobs: up to 256 ids whose log probabilities each token has as its alternatives
    logprob_token_ids: Sequence[int] | None
    # of the model's own logits, `raw_logprobs`, or of what the tokens were drawn from, `processed_logprobs`
    logprobs_mode: str | None
    echo: bool | None
    skip_special_tokens: bool | None
    # a message only every so many tokens
    stream_interval: int | None

    # at most one of these constrains the answer
    json_schema: str | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    # how the JSON of a schema is written: `spaced`, `compact` or `flexible`; properties as in the `schema` or `sorted`
    json_style: str | Sequence[str] | None


class GenerateOptions(ChatOptions, total=False):
    """The keywords of `generate` and `generate_stream`."""

    # Either of these two replaces the prompt.
    token_ids: Sequence[int] | None
    messages: ChatMessages | None


_OWN_FIELDS = (
    "model", "request_id", "priority", "session_id", "allow_inactive", "speculation", "json_schema", "regex", "grammar",
)  # fmt: skip
# The path of each option in GenerateSpec: most are fields of its groups, under their own names.
_PATHS: dict[str, str] = {
    **{name: name for name in _OWN_FIELDS},
    **{
        field.name: f"{group}.{field.name}"
        for group in ("prompt_options", "sampling", "stopping", "output")
        for field in inference_pb2.GenerateSpec.DESCRIPTOR.fields_by_name[group].message_type.fields  # type: ignore[union-attr]
        if field.name in GenerateOptions.__annotations__
    },
    "token_ids": "token_ids.ids",
    "adapter_id": "adapter",
    "choices": "choices.values",
    "truncate_prompt_tokens": "prompt_options.truncate_to",
}


# The words of options that are enums.
_WORDS: dict[str, dict[str, int]] = {
    "logprobs_mode": {
        "raw_logprobs": inference_pb2.LOGPROBS_MODE_RAW,
        "processed_logprobs": inference_pb2.LOGPROBS_MODE_PROCESSED,
    },
    "speculation": {"auto": inference_pb2.SPECULATION_AUTO, "off": inference_pb2.SPECULATION_OFF},
}


def _number_of(name: str, word: Any) -> int:
    words = _WORDS[name]
    if not isinstance(word, str) or word not in words:
        raise InvalidRequestError(f"{name}: {str(word)[:_SHOWN]!r} is not one of {', '.join(words)}", field=name)
    return words[word]


def with_keywords(options: type) -> Callable[[F], F]:
    """Show the keywords of a TypedDict in place of `**options` in a function's help."""

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        others = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        keywords = [
            inspect.Parameter(name, kind, default=None, annotation=annotation.__forward_arg__)
            for name, annotation in options.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*others, *keywords])  # type: ignore[attr-defined]
        return function

    return shown


def generate_request(
    prompt: str | None, options: GenerateOptions, response_format: Any = None
) -> inference_pb2.GenerateRequest:
    """Return the message for these arguments.

    Raises InvalidRequestError with the field of a bad value, and TypeError for an unknown keyword.
    """
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if (prompt is not None) + ("token_ids" in values) + ("messages" in values) != 1:
        raise InvalidRequestError("prompt: give exactly one of prompt, token_ids and messages", field="prompt")
    spec = inference_pb2.GenerateSpec()
    if prompt is not None:
        _place(spec, "prompt", prompt)
    if response_format is not None:
        if "json_schema" in values:
            raise InvalidRequestError("response_format: give either this or json_schema", field="response_format")
        values["json_schema"] = schema_of(response_format)
    of_chat = {name: values.pop(name) for name in CHAT_OPTIONS if name in values}
    if of_chat and "messages" not in values:
        name = min(of_chat)
        raise InvalidRequestError(f"{name}: belongs to a chat; give messages", field=name)
    for name, value in values.items():
        if name == "messages":
            spec.chat.CopyFrom(chat_of(value, of_chat))
        elif name == "adapters":
            spec.adapters.extend(weighted_adapters(value))
        elif name == "json_style":
            spec.json_style.CopyFrom(style_of(value))
        elif name in _PATHS:
            _place(spec, _PATHS[name], _number_of(name, value) if name in _WORDS else value)
        else:
            raise unknown_keyword(name, (*GenerateOptions.__annotations__, "response_format", "timeout_s"))
    return inference_pb2.GenerateRequest(spec=spec)


def fill(message: Message, options: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Set fields of a message to the options that are not None; `adapter_id` is its field `adapter`.

    Raises InvalidRequestError, and TypeError for a keyword that is not among `known`.
    """
    for name, value in options.items():
        if known and name not in known:
            raise unknown_keyword(name, known)
        field = "adapter" if name == "adapter_id" else name
        if value is None:
            continue
        if name == "adapters":
            value = weighted_adapters(value)  # noqa: PLW2901
        try:
            repeated = getattr(getattr(message, field), "extend", None)
            repeated(value) if repeated else setattr(message, field, value)
        except (TypeError, ValueError) as error:
            raise bad_value(message, field, name, value) from error


def weighted_adapters(
    adapters: Mapping[str, float] | Sequence[tuple[str, float]],
) -> list[inference_pb2.WeightedAdapter]:
    """Return the parts of a weighted set. Raises InvalidRequestError."""
    pairs = adapters.items() if isinstance(adapters, Mapping) else adapters
    try:
        return [inference_pb2.WeightedAdapter(adapter=name, weight=weight) for name, weight in pairs]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"adapters: each must be a name and a weight: {error}", field="adapters") from error


def _place(spec: inference_pb2.GenerateSpec, path: str, value: Any) -> None:
    """Set the field at `path`; a single string in a repeated field becomes a list of one string."""
    *outer, name = path.split(".")
    target: Message = spec
    try:
        for part in outer:
            target = getattr(target, part)
        target.SetInParent()  # Mark an empty list of ids as given, so that the server refuses it.
        current = getattr(target, name)
        if hasattr(current, "extend"):
            current.extend([value] if isinstance(value, str) else value)
        elif isinstance(value, Mapping):
            current.update(value)
        else:
            setattr(target, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise bad_value(target, name, path, value) from error


_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number from -2147483648 to 2147483647",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number from 0 to 4294967295",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 to 18446744073709551615",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "a str",
}
# Maximum number of characters of a wrong value that an error shows.
_SHOWN = 60


def bad_value(target: Message, name: str, path: str, value: Any) -> InvalidRequestError:
    """Return the error of a value that a field of a message does not take: what it takes, and what the value is."""
    field = target.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, of = (field.message_type.fields_by_name[part] for part in ("key", "value"))
        takes = f"a dict; each key is {_NUMBERS[key.cpp_type]}, each value {_NUMBERS[of.cpp_type]}"
    else:
        takes = _NUMBERS.get(field.cpp_type, "something else")
        takes = f"a list; each item is {takes}" if hasattr(getattr(target, name), "extend") else takes
    if isinstance(value, str) and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return InvalidRequestError(f"{path}: has half of a surrogate pair, which UTF-8 cannot encode", field=path)
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return InvalidRequestError(f"{path}: give {takes}; {shown} is of type {type(value).__name__}", field=path)
