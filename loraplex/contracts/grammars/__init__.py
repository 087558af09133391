"""Grammars of answers: routers build them from a request's format, workers compile them; both prove them first."""

from __future__ import annotations

# Maximum characters of a path and of a message: both may repeat a format, and a gRPC status holds some kilobytes.
_PATH_CHARACTERS, _MESSAGE_CHARACTERS = 200, 400


class GrammarError(Exception):
    """A format, or a grammar made from it, that cannot be served; `path` names the part at fault."""

    def __init__(self, path: str, message: str) -> None:
        self.path = _shortened(path, _PATH_CHARACTERS)
        self.message = _shortened(message, _MESSAGE_CHARACTERS)
        super().__init__(f"{self.path}: {self.message}")


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"
