"""Pages of lists (https://google.aip.dev/158): sizes, and tokens that say where the next page begins."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from rpc.errors import InvalidField

DEFAULT_SIZE = 100
MAX_SIZE = 1000
# A page ends early rather than outgrow a gRPC message (4 MiB).
_MAX_BYTES = 3 * 1024 * 1024

M = TypeVar("M", bound=Message)


def page_size(asked: int) -> int:
    """How many items a page may have. Raises InvalidField."""
    if asked < 0:
        raise InvalidField("page_size", f"{asked} is negative")
    return min(asked or DEFAULT_SIZE, MAX_SIZE)


def encode_token(key: Sequence[str | int]) -> str:
    """The token of the page that begins after the item with this key."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def decode_token(token: str, first: Sequence[Any]) -> list[Any]:
    """The key that the token was made of, `first` when it is empty. Raises InvalidField on one that is not ours."""
    if not token:
        return list(first)
    try:
        key = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        key = None
    kinds = [type(value) for value in first]
    if not isinstance(key, list) or [type(value) for value in key] != kinds or not all(_fits(value) for value in key):
        raise InvalidField("page_token", "is not one that this list gave")
    return key


def fit_page(messages: Sequence[M], size: int) -> Sequence[M]:
    """As many of the messages, in order, as one page takes; at least one if there is any."""
    used = 0
    for count, message in enumerate(messages[:size]):
        used += message.ByteSize()
        if count and used > _MAX_BYTES:
            return messages[:count]
    return messages[:size]


def _fits(value: Any) -> bool:
    """Whether the database takes it."""
    return abs(value) < 2**63 if isinstance(value, int) else value.isprintable()
