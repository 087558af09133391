"""The lines of a batch's file: checked before the first one runs, and put into the order in which they run.

A line is {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, its body what the gateway
takes at that path. Lines of one adapter run after each other, and of these those whose prompts begin alike: a worker
then loads an adapter once, and finds prefixes in its cache. The order depends on the file alone, so that another runner
knows which lines the first may have begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from loraplex.gateway.bodies import Body, check_json_size
from loraplex.gateway.errors import HttpError, renamed
from loraplex.gateway.openai_api import CHAT, COMPLETION, chat_options, completion_options, format_names
from loraplex.gateway.openai_messages import sdk_messages
from loraplex_client import BatchError

# Maximum lines of a batch, bytes of a line, characters of a custom_id, and errors that are told of a file.
LINES, LINE_BYTES, ID_CHARACTERS, ERRORS = 50_000, 4 * 1024 * 1024, 512, 100
# Maximum number of models of a batch, and characters of a model's name: the store gets all names in one message.
MODELS, MODEL_CHARACTERS = 5_000, 300
# Bytes of a prompt by which lines are ordered.
_PREFIX_BYTES = 256
_FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}


def _check_chat(body: Mapping[str, Any]) -> None:
    chat_options(body)
    sdk_messages(body["messages"])


def _check_completion(body: Mapping[str, Any]) -> None:
    completion_options(body)
    if body["prompt"] is None:
        raise HttpError(400, "missing_required_parameter", "prompt: is required", "prompt")


# By the path of a batch's lines: how their bodies are read, and checked.
BODIES: Mapping[str, tuple[Body, Callable[[Mapping[str, Any]], None]]] = {
    "/v1/chat/completions": (CHAT, _check_chat),
    "/v1/completions": (COMPLETION, _check_completion),
}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line: its number, from 1, and where it is in the file."""

    number: int
    offset: int
    size: int


@dataclass
class CheckedFile:
    """The lines of a file in the order in which they run, the first line of each model, and what is wrong with them."""

    lines: list[BatchLine] = field(default_factory=list)
    models: dict[str, int] = field(default_factory=dict)
    errors: list[BatchError] = field(default_factory=list)


def read_line(file: BinaryIO, line: BatchLine) -> dict[str, Any]:
    """Return a checked line's fields."""
    fields: dict[str, Any] = msgspec.json.decode(os.pread(file.fileno(), line.size, line.offset))
    return fields


def check_file(file: BinaryIO, endpoint: str) -> CheckedFile:
    """Read a file from its beginning and check its lines. It takes seconds: call it in a thread."""
    checked, keys, ids = CheckedFile(), list[tuple[str, bytes, int]](), dict[str, int]()
    offset = number = 0
    while text := file.readline(LINE_BYTES + 2):
        number += 1
        line, offset = BatchLine(number, offset, len(text)), offset + len(text)
        try:
            if number > LINES:
                raise HttpError(400, "too_many_lines", f"a batch has at most {LINES} lines")
            if len(text) > LINE_BYTES:
                raise HttpError(400, "line_too_large", f"is larger than {LINE_BYTES} bytes")
            fields = _fields(text, endpoint)
            if (first := ids.setdefault(fields["custom_id"], number)) != number:
                why = f"custom_id: {fields['custom_id'][:80]!r} is line {first}'s too; give each line its own"
                raise HttpError(400, "duplicate_custom_id", why, "custom_id")
            if checked.models.setdefault(fields["body"]["model"], number) == number and len(checked.models) > MODELS:
                why = f"body.model: a batch has at most {MODELS} models; give the others a batch of their own"
                raise HttpError(400, "too_many_models", why, "body.model")
        except HttpError as error:
            checked.errors.append(BatchError(error.code, f"line {number}: {error.message}", number, error.field))
            if (
                number > LINES
                or len(checked.models) > MODELS
                or len(text) > LINE_BYTES
                or len(checked.errors) == ERRORS
            ):
                break
            continue
        body = fields["body"]
        prefix = msgspec.json.encode(body.get("messages") or body.get("prompt"))[:_PREFIX_BYTES]
        checked.lines.append(line)
        keys.append((body["model"], prefix, number))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    checked.lines = [checked.lines[place] for place in order]
    if not (checked.lines or checked.errors):
        checked.errors.append(BatchError("empty_file", "the file has no line"))
    return checked


def _fields(text: bytes, endpoint: str) -> dict[str, Any]:
    """Return the fields of a line. Raises HttpError."""
    check_json_size(text)  # before it is parsed, in which no other thread has a turn
    try:
        fields = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:  # of msgspec, and UnicodeDecodeError
        cut = "" if text.endswith(b"\n") else ", and the file ends in it: was it sent in full?"
        raise HttpError(400, "invalid_json_line", f"is not JSON{cut}: {error}") from None
    if not isinstance(fields, dict):
        raise HttpError(400, "invalid_json_line", "is not a JSON object")
    for name, kind in _FIELDS.items():
        if name not in fields:
            raise HttpError(400, "missing_required_parameter", f"{name}: is required", name)
        if not isinstance(fields[name], kind):
            raise HttpError(400, "invalid_value", f"{name}: is not {'an object' if kind is dict else 'a text'}", name)
    if unknown := fields.keys() - _FIELDS.keys():
        name = min(unknown)[:80]
        raise HttpError(400, "unknown_parameter", f"{name}: unknown parameter", name)
    if not 1 <= len(fields["custom_id"]) <= ID_CHARACTERS:
        raise HttpError(400, "invalid_value", f"custom_id: has 1 to {ID_CHARACTERS} characters", "custom_id")
    if fields["method"] != "POST":
        raise HttpError(400, "invalid_method", f"method: {fields['method'][:80]!r} is not POST", "method")
    if fields["url"] != endpoint:
        why = f"url: {fields['url'][:80]!r} is not the batch's endpoint {endpoint}"
        raise HttpError(400, "mismatched_url", why, "url")
    _check_body(fields["body"], endpoint)
    return fields


def _check_body(body: Mapping[str, Any], endpoint: str) -> None:
    """Raise HttpError on what the gateway would refuse by itself, and on a stream."""
    reader, check = BODIES[endpoint]
    names: Mapping[str, str] = {}
    try:
        request = reader.read(msgspec.json.encode(body))
        names = format_names(request)
        check(request)
        if request.get("stream"):
            raise HttpError(400, "invalid_value", "stream: is not served in a batch; leave it out", "stream")
        if not request["model"]:
            raise HttpError(400, "invalid_value", "model: is empty", "model")
        if len(request["model"]) > MODEL_CHARACTERS:
            raise HttpError(400, "invalid_value", f"model: has more than {MODEL_CHARACTERS} characters", "model")
    except HttpError as error:
        error = renamed(error, names)
        told = error.message if not error.field else error.message.removeprefix(f"{error.field}: ")
        where = f"body.{error.field}" if error.field else "body"
        raise HttpError(error.status, error.code, f"{where}: {told}", where) from None
