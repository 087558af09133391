"""Requests for vectors of texts, inside the router. `router.api.encoding` makes these from the wire."""

from __future__ import annotations

from dataclasses import dataclass

from artifacts.encode import Pooling, Task
from router.request import WeightedAdapter


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are encoded as one sequence."""

    first: str
    second: str


# A text, a pair of texts, or the ids of one.
EncodeInput = str | TextPair | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """A client's request for a vector of each of its inputs; other fields as in Request.

    `fields` has the name of each input in the client's message. `truncate` cuts texts that are too long.
    """

    tenant: str
    task: Task
    inputs: tuple[EncodeInput, ...]
    fields: tuple[str, ...]
    pooling: Pooling = ""
    request_id: str = ""
    model: str = ""
    adapter: str = ""
    adapters: tuple[WeightedAdapter, ...] = ()
    truncate: bool = False
    priority: int = 0
    traceparent: str = ""
