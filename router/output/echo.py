"""The prompt's text in front of each answer, for requests that ask for it, and the text that a client has already."""

from __future__ import annotations

from router.request import Delta, Received

# Maximum characters of a delta: 1 MiB of a message's 4, since a character has at most 4 bytes.
PART_CHARACTERS = 256 * 1024


class Echo:
    """The prompt's text of one request; empty: it is not asked for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._size = len(text.encode())

    def deltas(self, choice: int, received: Received) -> list[Delta]:
        """Return the text as deltas without ids, without what the choice's client has of it."""
        had = received.text_bytes
        if had is None:  # its older client has it with the first ids
            had = self._size if received.token_ids or received.finished else 0
        text = without_bytes(self._text, had)
        parts = (text[at : at + PART_CHARACTERS] for at in range(0, len(text), PART_CHARACTERS))
        return [Delta(0, (), part, choice) for part in parts]

    def answer_bytes(self, received: Received) -> int | None:
        """Return how many bytes of the answer itself the client has; None: it did not say."""
        return None if received.text_bytes is None else max(0, received.text_bytes - self._size)


def without_bytes(text: str, count: int) -> str:
    """Return a text without its first `count` bytes of UTF-8."""
    return text.encode()[count:].decode(errors="ignore") if count else text
