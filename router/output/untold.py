"""The text of a choice that its client does not have yet, with a chat's reasoning and calls of tools told apart."""

from __future__ import annotations

from dataclasses import replace

from router.output.chat_reader import ChatReader
from router.output.echo import without_bytes
from router.request import Delta


class UntoldText:
    """Tells a client what deltas add. The client has `text_bytes` of the text; None: that of the tokens it has."""

    def __init__(self, text_bytes: int | None = None, reader: ChatReader | None = None) -> None:
        self._bytes_had = text_bytes
        self._reader = reader

    @property
    def has_calls(self) -> bool:
        """Return whether the answer has a complete call."""
        return self._reader is not None and self._reader.has_calls

    def tell(self, delta: Delta, before: str, *, ended: bool, had_all: bool) -> Delta:
        """Return a delta without what the client has. `before` is the text of the tokens in front of it, which it has.

        `ended`: nothing follows. `had_all`: the client has all of the answer's tokens, and with them the end of what
        they tell.
        """
        if self._reader is None:
            text = self._without_had(before, delta.text)
            return delta if text == delta.text else replace(delta, text=text)
        had, new = self._reader.feed(before), self._reader.feed(delta.text)
        text, reasoning = new.text, new.reasoning
        if ended:
            rest = self._reader.finish()
            if self._bytes_had is not None or not had_all:
                text += rest.text
            if not had_all:
                reasoning += rest.reasoning
        calls = tuple(new.tool_calls)
        return replace(delta, text=self._without_had(had.text, text), reasoning=reasoning, tool_calls=calls)

    def _without_had(self, before: str, text: str) -> str:
        if self._bytes_had is None:
            return text
        if not self._bytes_had:
            return before + text
        whole, had = before + text, self._bytes_had
        self._bytes_had = max(0, had - len(whole.encode()))
        return without_bytes(whole, had)
