"""The chat settings of an adapter or a base model: the field `loraplex_chat` of its JSON configuration.

    {"template": "{% for message in messages %}...", "system_prompt": "You are brief.", "tool_calls": "hermes"}

An adapter has it in adapter_config.json, a base model in tokenizer_config.json; each key may be left out. As a part of
the configuration it is a part of the revision's digest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from artifacts.errors import ArtifactError, MismatchError

CHAT_FIELD = "loraplex_chat"
# Maximum bytes of each setting.
_SETTING_BYTES = 256 * 1024


class ToolCallFormat(StrEnum):
    """The text that a model writes to call a tool; NONE: calls are not looked for."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """A Jinja template, a system prompt for chats without one, and the format of calls; empty: not set."""

    template: str = ""
    system_prompt: str = ""
    tool_calls: str = ""


def parse_chat_settings(value: Any) -> ChatSettings:
    """Parse the field's value. Raises ArtifactError, MismatchError on a key or a format that is not served."""
    if value is None:
        return ChatSettings()
    if not isinstance(value, dict):
        raise ArtifactError(CHAT_FIELD, "is not a JSON object")
    known = [field.name for field in fields(ChatSettings)]
    for key, text in value.items():
        if key not in known:
            raise MismatchError(f"{CHAT_FIELD}.{key}"[:200], f"is none of {', '.join(known)}")
        if not isinstance(text, str):
            raise ArtifactError(f"{CHAT_FIELD}.{key}", "is not a text")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise ArtifactError(f"{CHAT_FIELD}.{key}", "has half of a surrogate pair, which is no character") from None
        if size > _SETTING_BYTES:
            raise ArtifactError(f"{CHAT_FIELD}.{key}", f"is larger than {_SETTING_BYTES} bytes")
    formats = [tool_format.value for tool_format in ToolCallFormat]
    if value.get("tool_calls", "none") not in formats:
        raise MismatchError(f"{CHAT_FIELD}.tool_calls", f"{value['tool_calls']!r} is none of {', '.join(formats)}")
    return ChatSettings(**value)
