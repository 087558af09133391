"""The variables that a chat template gets, made of a request as JSON; and the end of a message that is continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from router.text.templates.environment import Json, RefusedError, Template

# Text that marks the end of a message that the answer continues; transformers uses the same.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Variables that a request's template_args may not set: other fields of the chat do.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def render(template: Template, request: Mapping[str, Any]) -> str:
    """Render a request of router.text.templates.pool. Raises RefusedError and whatever the template raises."""
    chat = request["chat"]
    if chat["tools"] and not template.renders_tools:
        raise RefusedError("the chat template renders no tools", "chat.tools")
    messages = [_message(template, index, message) for index, message in enumerate(chat["messages"])]
    final = _mark_end(messages) if chat["continue_final_message"] else None
    variables = {
        **request["tokens"],
        "documents": None,
        **_template_args(chat["template_args"]),
        "messages": messages,
        "tools": [_tool(index, tool) for index, tool in enumerate(chat["tools"])] or None,
        "add_generation_prompt": chat["add_generation_prompt"],
    }
    text = template.render(variables, request["now"], request["limit"])
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedError("the rendered chat has half of a surrogate pair, which is no character") from None
    return text if final is None else _cut_at_end(text, final)


def _template_args(text: str) -> Json:
    given = _object("chat.template_args", text or "{}")
    if taken := _RESERVED & given.keys():
        raise RefusedError(
            f"{min(taken)} is not for template_args to set: the chat has a field for it", "chat.template_args"
        )
    return given


def _message(template: Template, index: int, given: Json) -> Json:
    """Return a message as templates know it: without what is not given, its arguments parsed."""
    field = f"chat.messages[{index}]"
    if given["role"] == "developer" and not template.knows_role("developer"):
        raise RefusedError("the chat template does not know the role developer; use system", f"{field}.role")
    message: Json = {"role": given["role"]}
    if given["parts"]:
        parts = [{"type": "text", "text": text} for text in given["parts"]]
        message["content"] = parts if template.takes_parts else "".join(given["parts"])
    elif given["content"] or not given["tool_calls"]:
        message["content"] = given["content"]
    if given["tool_calls"]:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": _object(f"{field}.tool_calls[{at}].arguments", call["arguments"] or "{}"),
                },
            }
            for at, call in enumerate(given["tool_calls"])
        ]
    message |= {name: given[name] for name in ("tool_call_id", "name") if given[name]}
    if given["reasoning"]:  # under the two names that templates read, in transformers' order
        return {"thinking": given["reasoning"], **message, "reasoning_content": given["reasoning"]}
    return message


def _tool(index: int, tool: Json) -> Json:
    parameters = _object(f"chat.tools[{index}].parameters", tool["parameters"] or '{"type":"object","properties":{}}')
    description = {"description": tool["description"]} if tool["description"] else {}
    return {"type": "function", "function": {"name": tool["name"], **description, "parameters": parameters}}


def _object(field: str, text: str) -> Json:
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
