"""Messages and tools of a chat as templates know them, those of other services and cut answers included."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NoReturn

Json = dict[str, Any]


class RefusedError(Exception):
    """A request that can't be rendered; the message says why, `field` is the field of the chat that is to blame."""

    def __init__(self, message: str, field: str = "chat.messages", reason: str = "CHAT_TEMPLATE") -> None:
        super().__init__(message)
        self.field = field
        self.reason = reason


@dataclass(frozen=True)
class MessageForm:
    """Describes what a template expects of messages.

    takes_parts     contents are lists of parts, not texts
    knows_developer there is a role developer; else its messages are the system's
    late_system     messages of the system may be anywhere; else later ones are a part of the user's
    arguments       the type of a call's arguments: dict, or str for their JSON text
    no_content      the field `content` of a message with calls and without a text, or none
    """

    takes_parts: bool = False
    knows_developer: bool = False
    late_system: bool = True
    arguments: type = dict
    no_content: tuple[tuple[str, str | None], ...] = ()


def template_messages(messages: Sequence[Json], form: MessageForm) -> list[Json]:
    """Return messages without what is not given, each call and its result with an id."""
    made: list[Json] = []
    ids, open_calls = (f"call{number:05d}" for number in count()), list[str]()
    # Whether the conversation has begun, and whether its last turn is the user's for a message of the system.
    begun = in_place = False
    for message in messages:
        turn = _message(message, form, ids)
        if turn["role"] == "tool":
            if "tool_call_id" not in turn and open_calls:
                turn["tool_call_id"] = open_calls[0]
            if turn.get("tool_call_id") in open_calls:
                open_calls.remove(turn["tool_call_id"])
        open_calls += (call["id"] for call in turn.get("tool_calls", ()))
        moved = turn["role"] == "system" and begun and not form.late_system
        if moved:
            turn["role"] = "user"
        before = made[-1]["role"] if made else ""
        is_developer = message["role"] == "developer" and turn["role"] == before == "system"
        if is_developer or (turn["role"] == before == "user" and (moved or in_place)):
            made[-1]["content"] = _joined(made[-1]["content"], turn["content"])
        else:
            made.append(turn)
        begun, in_place = begun or turn["role"] != "system", moved
    return made


def has_late_system(messages: Sequence[Json]) -> bool:
    """Return whether a message of the system comes behind others."""
    is_system = [message["role"] in ("system", "developer") for message in messages]
    return any(later and not earlier for earlier, later in pairwise(is_system))


def _message(message: Json, form: MessageForm, ids: Iterator[str]) -> Json:
    role = message["role"]
    made: Json = {"role": "system" if role == "developer" and not form.knows_developer else role}
    if message["parts"]:
        parts = [{"type": "text", "text": text} for text in message["parts"]]
        made["content"] = parts if form.takes_parts else "".join(message["parts"])
    elif message["content"] or not message["tool_calls"]:
        made["content"] = message["content"]
    else:
        made |= form.no_content
    if message["tool_calls"]:
        made["tool_calls"] = [
            {
                "id": call["id"] or next(ids),
                "type": "function",
                "function": {"name": call["name"], "arguments": _arguments(call["arguments"], form)},
            }
            for call in message["tool_calls"]
        ]
    made |= {name: message[name] for name in ("tool_call_id", "name") if message[name]}
    if message["reasoning"]:  # under the two names that templates read, in transformers' order
        return {"thinking": message["reasoning"], **made, "reasoning_content": message["reasoning"]}
    return made


def _joined(first: str | list[Json], second: str | list[Json]) -> str | list[Json]:
    """Return two contents as one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [
        part
        for content in (first, second)
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


# The field around arguments that are no beginning of a JSON object, as Anthropic advises to send them back.
_INVALID = "INVALID_JSON"


def _arguments(text: str, form: MessageForm) -> str | Json:
    """Return a call's arguments, whatever their text: an answer may have been cut in them."""
    if form.arguments is str:
        return text.strip() or "{}"
    value = _parsed(text) if text.strip() else {}
    if value is None:
        value = next((value for value in map(_parsed, _closed(text)) if value is not None), {_INVALID: text})
    return value


def _parsed(text: str) -> Json | None:
    """Return the object that a text is; None where it is none, or nested too deeply."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, strict=False)
    except (RecursionError, ValueError):
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


# A string, whose group is its last quote unless the text is cut in it; or what opens, closes or separates values.
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*("|\\?\Z)|[\[\]{},]', re.DOTALL)
# A part of an escaped character, such as the first half of one that is written as two, at the end of a text.
_PART = re.compile(r"(?<!\\)((?:\\\\)*)(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
_ENDS = {"{": "}", "[": "]"}


def _closed(text: str) -> Iterator[str]:
    """Yield a JSON text that was cut with its missing end: behind all of it, and behind its last whole value."""
    stack, cut, is_open = list[str](), 0, False
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece in _ENDS:
            stack.append(_ENDS[piece])
            cut = match.end()
        elif piece in ("}", "]") and stack:
            stack.pop()
            cut = match.end()
        elif piece == ",":
            cut = match.start()
        is_open = piece[0] == '"' and match[1] != '"'
    ends = "".join(reversed(stack))
    yield (_PART.sub(r"\1", text, count=1) + '"' if is_open else text) + ends
    yield text[:cut] + ends


def template_tool(index: int, tool: Json) -> Json:
    """Return a tool. Raises RefusedError."""
    field = f"chat.tools[{index}].parameters"
    parameters = json_object(field, tool["parameters"] or '{"type":"object","properties":{}}')
    description = {"description": tool["description"]} if tool["description"] else {}
    return {"type": "function", "function": {"name": tool["name"], **description, "parameters": parameters}}


def json_object(field: str, text: str) -> Json:
    """Parse a JSON object. Raises RefusedError."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise RefusedError("is nested too deeply", field) from None
    except ValueError as error:
        raise RefusedError(f"is not JSON: {error}", field) from None
    if not isinstance(value, dict):
        raise RefusedError("is not a JSON object", field)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
