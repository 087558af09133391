"""Renders chat templates, as a child process of rpc.children, in the form of messages that each template expects.

Templates are anybody's: Jinja's sandbox keeps them from the interpreter, and this process has no environment, opens no
files after its start, has limited memory, and is killed by the kernel after CPU_S of work on one request. The
environment is that of transformers' apply_chat_template (transformers.utils.chat_template_utils).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import count, pairwise, product
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from loraplex.runtime.rpc.children.child import LAST, serve

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


class _Generation(jinja2.ext.Extension):
    """Render what is between `{% generation %}` and `{% endgeneration %}`, which matters for training alone."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an attribute of instances

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """See jinja2.ext.Extension."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class _Dict:
    """Make dictionaries, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> Json:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> Json:
        """Return a dictionary of these keys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name of the template's
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the attribute {name!r} of a namespace begins with an underscore")


def _raise(message: Any) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Template:
    """A compiled template, and what it knows: tools, and the form of its messages."""

    def __init__(self, source: str) -> None:
        self._now = 0.0
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(self._now).strftime(form)
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _Namespace
        tree = environment.parse(source)
        self._form = MessageForm(
            takes_parts=any(map(_is_content, (loop.iter for loop in tree.find_all(jinja2.nodes.For)))),
            knows_developer=re.search("""(['"])developer\\1""", source) is not None,
        )
        # Whether the forms of messages with calls and of late messages of the system were tried out.
        self._calls_tried = self._system_tried = False
        self.renders_tools = re.search(r"\btools\b", source) is not None
        self._template = environment.from_string(source)

    def form(self, messages: Sequence[Json], tokens: Mapping[str, str]) -> MessageForm:
        """Return the form of its messages. For the first chat with calls it renders some that differ in their form."""
        if not self._calls_tried and any(message["tool_calls"] for message in messages):
            self._form, self._calls_tried = max(self._forms(), key=lambda form: self._shown(form, tokens)), True
        if not self._system_tried and has_late_system(messages):
            late_system = "tried_system" in self._try(_TRIED_SYSTEM, self._form, tokens)
            self._form, self._system_tried = replace(self._form, late_system=late_system), True
        return self._form

    def _forms(self) -> Iterator[MessageForm]:
        """Yield the forms of a message with calls, those first that most templates expect."""
        contents: Sequence[tuple[tuple[str, str | None], ...]] = ((), (("content", ""),), (("content", None),))
        for arguments, no_content in product((dict, str), contents):
            yield replace(self._form, arguments=arguments, no_content=no_content)

    def _shown(self, form: MessageForm, tokens: Mapping[str, str]) -> int:
        """Return how much the template shows of a call in this form: 0 nothing, 1 its name, 2 its arguments too."""
        text = self._try(_TRIED_CALLS, form, tokens)
        if "tried_name" not in text:
            return 0
        return 2 if "tried_key" in text and "'tried_key'" not in text else 1  # not as Python writes a mapping

    def _try(self, messages: Sequence[Json], form: MessageForm, tokens: Mapping[str, str]) -> str:
        """Return the text of messages in a form; empty where the template refuses them."""
        made = template_messages(messages, form)
        variables = {**tokens, "messages": made, "tools": None, "add_generation_prompt": True}
        try:
            return self.render(variables, 0.0, _TRIED_CHARACTERS)
        except Exception:  # anybody may have written the template: it may raise anything
            return ""

    def render(self, variables: Mapping[str, Any], now: float, limit: int) -> str:
        """Return the text, of at most `limit` characters. Raises RefusedError and whatever the template raises."""
        self._now = now
        pieces, size = [], 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise RefusedError(f"more than {limit} characters", reason="CONTEXT_EXCEEDED")
        return "".join(pieces)


# Chats of which a template shows what it knows, and the maximum number of their characters.
_NOTHING: Json = {"content": "", "parts": [], "tool_calls": [], "tool_call_id": "", "name": "", "reasoning": ""}
_TRIED_CALLS: Sequence[Json] = [
    {**_NOTHING, "role": "user", "content": "x"},
    {
        **_NOTHING,
        "role": "assistant",
        "tool_calls": [{"id": "abcdefghi", "name": "tried_name", "arguments": '{"tried_key": "x"}'}],
    },
    {**_NOTHING, "role": "tool", "tool_call_id": "abcdefghi", "name": "x", "content": "x"},
]
_TRIED_SYSTEM: Sequence[Json] = [
    {**_NOTHING, "role": "user", "content": "x"},
    {**_NOTHING, "role": "system", "content": "tried_system"},
    {**_NOTHING, "role": "assistant", "content": "x"},
]
_TRIED_CHARACTERS = 100_000


def _is_content(iterated: jinja2.nodes.Node) -> bool:
    """Return whether a loop is over `message.content`, `message['content']` or `content`."""
    while isinstance(iterated, jinja2.nodes.Filter) and iterated.node is not None:
        iterated = iterated.node
    if isinstance(iterated, jinja2.nodes.Getitem):
        return isinstance(iterated.arg, jinja2.nodes.Const) and iterated.arg.value == "content"
    if isinstance(iterated, jinja2.nodes.Getattr):
        return iterated.attr == "content"
    return isinstance(iterated, jinja2.nodes.Name) and iterated.name == "content"


# Text that marks the end of a message that the answer continues; transformers uses the same.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Variables that a request's template_args may not set: other fields of the chat do.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def render(template: Template, request: Mapping[str, Any]) -> str:
    """Render a request of loraplex.router.text.chat. Raises RefusedError and whatever the template raises."""
    chat = request["chat"]
    if chat["tools"] and not template.renders_tools:
        raise RefusedError("the chat template renders no tools", "chat.tools")
    messages = template_messages(chat["messages"], template.form(chat["messages"], request["tokens"]))
    final = _mark_end(messages) if chat["continue_final_message"] else None
    variables = {
        **request["tokens"],
        "documents": None,
        **_template_args(chat["template_args"]),
        "messages": messages,
        "tools": [template_tool(index, tool) for index, tool in enumerate(chat["tools"])] or None,
        "add_generation_prompt": chat["add_generation_prompt"],
    }
    text = template.render(variables, request["now"], request["limit"])
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedError("the rendered chat has half of a surrogate pair, which is not a character") from None
    if _ADDRESS.search(text):
        given = json.dumps([request["source"], chat], ensure_ascii=False)
        text = _ADDRESS.sub(lambda found: found[0] if found[0] in given else "", text)
    return text if final is None else _cut_at_end(text, final)


# The address that Python shows of a function or an object without a text of its own.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _template_args(text: str) -> Json:
    arguments = json_object("chat.template_args", text or "{}")
    if taken := _RESERVED & arguments.keys():
        raise RefusedError(
            f"{min(taken)} is not for template_args to set: the chat has a field for it", "chat.template_args"
        )
    return arguments


def _mark_end(messages: list[Json]) -> str:
    """Put a mark behind the last message's text; return that text."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        text = str(content[-1]["text"])
        content[-1]["text"] += _CONTINUE_TAG
    elif content is not None:
        text = str(content)
        messages[-1]["content"] += _CONTINUE_TAG
    else:
        raise RefusedError("the last message has no content that could be continued", "chat.continue_final_message")
    return text


def _cut_at_end(text: str, final: str) -> str:
    """Cut a rendered text behind the message that is continued."""
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise RefusedError("the chat template does not show the last message as it is", "chat.continue_final_message")
    at = text.rindex(tag)
    if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:at]
    return text[:at].rstrip()  # the template trims messages


# Maximum processor time in seconds that one request may take.
CPU_S = 0.5
# Maximum address space in bytes of this process; Jinja and Python need about a tenth.
MEMORY_BYTES = 1 << 29
# Maximum number of compiled templates that are kept.
TEMPLATES_KEPT = 256

_compiled = lru_cache(TEMPLATES_KEPT)(Template)


def _answer(request: Mapping[str, Any]) -> Json:
    """Return the text, or the field to blame and why."""
    try:
        return {"text": render(_compiled(request["source"]), request)}
    except RefusedError as error:
        return {"field": error.field, "error": str(error), "reason": error.reason}
    except MemoryError:
        return {"field": "chat.messages", "error": "the chat template needs too much memory", LAST: True}
    except RecursionError:
        return {"field": "chat.messages", "error": "the chat template calls itself too deeply"}
    except Exception as error:  # anybody may have written the template: it may raise anything
        return {"field": "chat.messages", "error": f"the chat template refuses them: {_line(error)}"}


# What a message may show of this process: addresses of objects, and the directories of files.
_OURS = re.compile(r" at 0x[0-9a-fA-F]+|(?<!\S)['\"]?(/[\w.-]+)+/(?=[\w.-])")


def _line(error: Exception) -> str:
    where = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
    return _OURS.sub("", re.sub(r"\s+", " ", str(error)))[:300] + where


# Uses everything that imports a module with its first use, for which a child opens files that it may not open later.
_LATE = "{{ strftime_now('%Y') }}{{ 'a'|wordwrap }}{{ 'a'|pprint }}{{ 'a'|striptags }}{{ lipsum(n=1) }}"


def main() -> None:
    """Answer requests until stdin ends."""
    with contextlib.suppress(TemplateError):  # imports what Jinja imports late, for an error too
        Template(_LATE + "{{ raise_exception('') }}").render({}, 0.0, 10_000)
    serve(_answer, cpu_s=lambda request: CPU_S, memory_bytes=MEMORY_BYTES, nice=5)


if __name__ == "__main__":
    main()
