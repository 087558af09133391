"""Chat templates: a model's own, or an adapter's, with its special tokens and formats; and their rendering."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.chat_formats import CALLS, REASONING, CallFormat, ReasoningFormat
from loraplex.contracts.artifacts.peft_config import CHAT_FIELD, ChatSettings, parse_chat_settings
from loraplex.router.request import Chat, ChatMessage, Tool, ToolCall
from loraplex.runtime.rpc.children.pool import CHILDREN, WALL_S, ChildDiedError, ChildPool
from loraplex.runtime.rpc.errors import InvalidField

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TemplateCall:
    """A template with a chat: the special tokens that it may name, the time `now`, the most characters it may make."""

    source: str
    tokens: Mapping[str, str]
    chat: Chat
    now: float
    limit: int


class TemplateRenderer:
    """Renders chat templates. The first requests start the children."""

    def __init__(self, children: int = CHILDREN, wall_s: float = WALL_S) -> None:
        self.children = ChildPool("loraplex.router.text.chat_templates", "TEMPLATES_BUSY", children, wall_s)

    async def render(self, call: TemplateCall, tenant: str) -> str:
        """Return the text of a chat. Raises InvalidField with the template's own words, or Unavailable.

        The reason is CONTEXT_EXCEEDED where the text has more than `limit` characters.
        """
        try:
            answer = await self.children.ask(tenant, call)
        except ChildDiedError as error:
            raise InvalidField("chat.messages", f"the chat template {error}", reason="CHAT_TEMPLATE") from None
        if "text" not in answer:
            raise InvalidField(answer["field"], answer["error"], reason=answer.get("reason", "CHAT_TEMPLATE"))
        return str(answer["text"])

    def close(self) -> None:
        """End the children, those that work too."""
        self.children.close()


_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template's source, and another one for chats with tools where a model has it; empty: there is none."""

    source: str = ""
    tool_source: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict)
    system_prompt: str = ""
    # The formats that the configuration names or has; empty or None: the template shows them.
    calls: str | CallFormat = ""
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> ChatTemplate:
        """Return the template among a model's files. Raises ValueError where a file is broken."""
        config = _json(files, "tokenizer_config.json")
        names = _json(files, "special_tokens_map.json") | config
        sources = config.get("chat_template") or ""
        if "chat_template.jinja" in files:
            sources = files["chat_template.jinja"].decode()
        if isinstance(sources, list):  # several templates, by name
            by_name = {entry["name"]: entry["template"] for entry in sources}
        else:
            by_name = {"default": sources}
        if "tool_use.jinja" in files:
            by_name["tool_use"] = files["tool_use.jinja"].decode()
        tokens = {name: _token(names[name]) for name in _TOKENS if names.get(name)}
        try:
            settings = parse_chat_settings(config.get(CHAT_FIELD))
        except ArtifactError as error:
            raise ValueError(f"tokenizer_config.json: {error}") from error
        template = cls(str(by_name.get("default", "")), str(by_name.get("tool_use", "")), tokens)
        return template.with_settings(settings)

    def with_settings(self, settings: ChatSettings, eos_token: str = "") -> ChatTemplate:
        """Return this template as an adapter's settings and its eos_token, or the model's own, change it."""
        return replace(
            self,
            source=settings.template or self.source,
            tool_source=settings.tool_template or (self.tool_source if not settings.template else ""),
            tokens={**self.tokens, "eos_token": eos_token} if eos_token else self.tokens,
            system_prompt=settings.system_prompt or self.system_prompt,
            calls=settings.tool_calls or ("" if settings.template else self.calls),
            reasoning=settings.reasoning or (None if settings.template else self.reasoning),
        )

    def source_for(self, chat: Chat) -> str:
        """Return the source that renders a chat. Raises InvalidField where there is none."""
        source = (chat.tools and self.tool_source) or self.source
        if not source:
            raise InvalidField("chat", "the model has no chat template; send a prompt", reason="NO_CHAT_TEMPLATE")
        return source

    def call(self, chat: Chat, now: float, limit: int) -> TemplateCall:
        """Return the call that renders a chat. Raises InvalidField."""
        if self.system_prompt and chat.messages[0].role not in ("system", "developer"):
            chat = replace(chat, messages=(ChatMessage("system", self.system_prompt), *chat.messages))
        return TemplateCall(self.source_for(chat), self.tokens, chat, now, limit)

    def call_format(self, chat: Chat) -> CallFormat | None:
        """Return the model's format of tool calls: the one of its family that the template contains."""
        if isinstance(self.calls, CallFormat):
            return self.calls
        shown = [form for form in CALLS.values() if form.is_shown(self.source_for(chat))]
        if self.calls:
            shown = [form for form in shown if form.name.startswith(f"{self.calls}_")]
            return (*shown, CALLS.get(self.calls))[0]
        return shown[0] if shown else None

    def reasoning_format(self, chat: Chat) -> ReasoningFormat | None:
        """Return the texts around a reasoning block; None where the template knows no such blocks."""
        source = self.source_for(chat)
        return self.reasoning or next((form for form in REASONING if form.is_shown(source)), None)


def tokenizer_config(files: Mapping[str, bytes], template: ChatTemplate) -> str:
    """Return a tokenizer's configuration as JSON, with special tokens as texts and the template of chats."""
    config = _json(files, "tokenizer_config.json")
    return json.dumps({**config, **template.tokens, "chat_template": template.source or None}, ensure_ascii=False)


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    value = json.loads(files.get(name, b"{}"))
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _token(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def shielded_chat(chat: Chat, shield: Callable[[str], str]) -> Chat:
    """Return a chat with every text of its messages and tools shielded."""
    return replace(
        chat,
        messages=tuple(replace(_shielded(message, shield), role=message.role) for message in chat.messages),
        tools=_shielded(chat.tools, shield),
    )


def _shielded(value: T, shield: Callable[[str], str]) -> T:
    """Return a value with every text in it shielded."""
    if isinstance(value, tuple):
        return cast(T, tuple(_shielded(one, shield) for one in value))
    if isinstance(value, (ChatMessage, Tool, ToolCall)):
        return replace(value, **{one.name: _shielded(getattr(value, one.name), shield) for one in fields(value)})
    if not isinstance(value, str):
        return value
    plain = _ESCAPED.sub(_unescaped, value)
    return cast(T, shield(value) if shield(plain) == plain else shield(plain))


# Characters that a JSON text writes as escapes, and that templates see as they are.
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


def _unescaped(escaped: re.Match[str]) -> str:
    if escaped[0] == r"\/":
        return "/"
    character = chr(int(escaped[1] or "0", 16))
    return character if character.isprintable() and character not in '"\\' else escaped[0]
