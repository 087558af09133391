"""Renders chat templates in child processes (see rpc.children), in turns of the tenants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.request import Chat
from rpc.children.pool import CHILDREN, WALL_S, ChildDiedError, ChildPool
from rpc.errors import InvalidField


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
        self.children = ChildPool("router.text.templates.child", "TEMPLATES_BUSY", children, wall_s)

    async def render(self, call: TemplateCall, tenant: str) -> str:
        """Return the text of a chat. Raises InvalidField with the template's own words, or Unavailable."""
        try:
            answer = await self.children.ask(tenant, call)
        except ChildDiedError as error:
            raise InvalidField("chat.messages", f"the chat template {error}", reason="CHAT_TEMPLATE") from None
        if "text" not in answer:
            raise InvalidField(answer["field"], answer["error"], reason="CHAT_TEMPLATE")
        return str(answer["text"])

    def close(self) -> None:
        """End the children, those that work too."""
        self.children.close()
