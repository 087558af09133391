"""Formats of answers as callers write them: pydantic models and JSON schemas. pydantic is used only where it is there.

person = client.generate("...", response_format=Person)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from loraplex.inference.v1 import inference_pb2

from loraplex_client.errors import AnswerFormatError, InvalidRequestError
from loraplex_client.generation import Generation

M = TypeVar("M")

_ANY_OBJECT = {"type": "object"}
# The words of a style, as a field of JsonStyle and its value.
_STYLES = {
    "compact": ("whitespace", inference_pb2.JSON_WHITESPACE_COMPACT),
    "flexible": ("whitespace", inference_pb2.JSON_WHITESPACE_FLEXIBLE),
    "schema": ("property_order", inference_pb2.PROPERTY_ORDER_SCHEMA),
    "sorted": ("property_order", inference_pb2.PROPERTY_ORDER_SORTED),
}


def schema_of(response_format: Any) -> str:
    """Return the JSON schema of a format. Raises InvalidRequestError where there is none.

    A format is a pydantic model, a type that pydantic knows, a schema, or one of these as a value of `schema` (in
    `json_schema` or not), as OpenAI's and LoRAX's clients write it; a type `json_object` alone is any object.
    """
    if isinstance(response_format, str):
        return response_format
    if isinstance(response_format, Mapping):
        return json.dumps(_unwrapped(response_format), ensure_ascii=False)
    if hasattr(response_format, "model_json_schema"):
        return json.dumps(response_format.model_json_schema(), ensure_ascii=False)
    return json.dumps(_adapter_of(response_format).json_schema(), ensure_ascii=False)


def style_of(given: str | Sequence[str]) -> inference_pb2.JsonStyle:
    """Return the style of JSON that words stand for. Raises InvalidRequestError."""
    style = inference_pb2.JsonStyle()
    for word in (given,) if isinstance(given, str) else given:
        if word not in _STYLES:
            raise InvalidRequestError(f"json_style: {word!r} is none of {', '.join(_STYLES)}", field="json_style")
        field, value = _STYLES[word]
        if getattr(style, field) not in (0, value):
            raise InvalidRequestError(f"json_style: {word!r} contradicts another word", field="json_style")
        setattr(style, field, value)
    return style


def parse_answer(generation: Generation, response_format: Any) -> Generation:
    """Return an answer with its `parsed` object; one with calls of tools has none. Raises AnswerFormatError."""
    if response_format is None or generation.tool_calls:
        return generation
    try:
        return dataclasses.replace(generation, parsed=_parsed(generation.text, response_format))
    except ValueError as error:  # pydantic's and json's errors are such
        raise AnswerFormatError(
            f"the answer, which ended by {generation.finish_reason}, is not of its format: {error}",
            text=generation.text,
        ) from error


def _unwrapped(given: Mapping[str, Any]) -> Any:
    if given.get("type") not in ("json_object", "json_schema"):
        return given
    inner = given.get("json_schema", given)
    schema = inner.get("schema", _ANY_OBJECT) if isinstance(inner, Mapping) else inner
    return json.loads(schema) if isinstance(schema, str) else schema


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
