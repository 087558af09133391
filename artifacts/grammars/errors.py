"""The error of a format that cannot be served."""

from __future__ import annotations


class GrammarError(Exception):
    """A format, or a grammar made from it, that cannot be served; `path` names the part at fault."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message
