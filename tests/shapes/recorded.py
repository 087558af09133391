"""Requests as today's clients send them: a file for each client, whose next version is one more.

`origin` says whether a client's requests were recorded, by a server that answers with a call and then with a text, or
written by hand. Long texts are shortened and most tools left out; nothing else is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Maximum number of tokens that a request asks for in place of its own number, which is up to 64,000.
TOKENS = 4
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True)
class Recorded:
    """A request of a client."""

    client: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    def body_for(self, model: str, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
        """Return the body with a model of ours, a limit of tokens and further fields."""
        if self.path.endswith(("/count_tokens", "/tokenize")):
            return {**self.body, "model": model, **more}
        own = "max_output_tokens" if self.path == "/v1/responses" else "max_tokens"
        limits = {name: tokens for name in _LIMITS if name in self.body} or {own: tokens}
        return {**self.body, "model": model, **limits, **more}


def recorded() -> dict[str, Recorded]:
    """Return all requests by client and number."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.json")):
        entry = json.loads(file.read_text())
        for number, request in enumerate(entry["requests"]):
            made = Recorded(entry["client"], request["path"].partition("?")[0], request["headers"], request["body"])
            found[f"{file.stem} {number}"] = made
    return found
