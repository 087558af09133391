"""Pages of lists (https://google.aip.dev/158): their sizes, and the tokens from which the next page begins."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from rpc.errors import InvalidField

DEFAULT_SIZE = 100
MAX_SIZE = 1000
# A page ends early rather than outgrow a gRPC message (4 MiB).
_MAX_BYTES = 3 * 1024 * 1024

M = TypeVar("M", bound=Message)
R = TypeVar("R")


def page_size(asked: int) -> int:
    """Return how many items a page may have. Raises InvalidField."""
    if asked < 0:
        raise InvalidField("page_size", f"{asked} is negative")
    return min(asked or DEFAULT_SIZE, MAX_SIZE)


def encode_token(key: Sequence[str | int]) -> str:
    """Return the token of the page that begins after the item of this key."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def decode_token(token: str, first: Sequence[Any]) -> list[Any]:
    """Return the key that a token was made from; `first` for an empty token. Raises InvalidField on a foreign token."""
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


def fill_page(
    records: Iterable[R], convert: Callable[[R], M], key: Callable[[R], Sequence[str | int]], size: int
) -> tuple[list[M], str]:
    """Return the messages of a page, in order, at least one if there are any; and the next page's token, or nothing.

    No more records are read than that needs.
    """
    page: list[M] = []
    used, last = 0, None
    for record in records:
        message = convert(record)
        used += message.ByteSize()
        if last is not None and (len(page) == size or used > _MAX_BYTES):
            return page, encode_token(last)
        page.append(message)
        last = key(record)
    return page, ""


def _fits(value: Any) -> bool:
    """Return whether the database can store the number."""
    return abs(value) < 2**63 if isinstance(value, int) else value.isprintable()
