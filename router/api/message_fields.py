"""Counts the fields in the bytes of a message, before it is decoded: a decoder makes an object of each.

A message of 4 MiB may hold two million parts of a chat, whose decoding would keep the event loop for tens of
milliseconds. The format of the bytes: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import re
from functools import cache

from google.protobuf.descriptor import Descriptor

# Maximum number of fields of a message, those of the messages in it too; packed numbers count as one. A chat has about
# three for each of its messages. Ten thousand are counted in two to ten milliseconds, by the lengths of their numbers,
# and decoded in one.
FIELDS = 10_000
# Maximum depth of messages in messages that is counted; decoders refuse deeper ones.
_DEEPEST = 100
# A field's number to its end. Decoders refuse longer ones than 10 bytes, which may be as long as the message.
_NUMBER = re.compile(rb"[\x80-\xff]{0,9}+[\x00-\x7f]")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _ExcessError(Exception):
    """More fields than the maximum; the text is the path of the first one above it."""


def field_in_excess(data: bytes, message: Descriptor, limit: int = FIELDS) -> str:
    """Return the path of the first field above the maximum number in a message's bytes; empty: there are no more.

    Bytes that are no message have none: their decoder refuses them.
    """
    if len(data) <= limit:  # a field has at least a byte
        return ""
    try:
        _count(data, 0, len(data), message, limit, (), _DEEPEST)
    except _ExcessError as excess:
        return str(excess)
    except (IndexError, ValueError):  # the bytes end in the middle of a number, or a number has no end
        return ""
    return ""


def _count(data: bytes, at: int, end: int, message: Descriptor, left: int, path: tuple[str, ...], depth: int) -> int:
    """Return how many fields may follow those between two places of the bytes.

    Raises _ExcessError; IndexError or ValueError where a number does not end.
    """
    fields = _fields(message)
    while at < end:
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _tag_or_size(data, at - 1)
        name, inner = fields.get(tag >> 3, ("", None))
        if not left:
            raise _ExcessError(".".join((*path, name)) if name else ".".join(path))
        left -= 1
        kind = tag & 7
        if kind == _BYTES:
            size = data[at]
            at += 1
            if size > 127:
                size, at = _tag_or_size(data, at - 1)
            if inner is not None and depth:
                left = _count(data, at, min(at + size, end), inner, left, (*path, name), depth - 1)
            at += size
        elif kind == _VARINT:
            at = at + 1 if data[at] < 128 else _end_of_number(data, at)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
    return left


def _tag_or_size(data: bytes, at: int) -> tuple[int, int]:
    """Return the number of two bytes or more that begins at a place, and the place behind it.

    Raises IndexError, or ValueError beyond five bytes, which decoders refuse here. Written out, since a loop takes five
    times as long.
    """
    value, byte = data[at] & 127, data[at + 1]
    if byte < 128:
        return value | byte << 7, at + 2
    value, byte = value | (byte & 127) << 7, data[at + 2]
    if byte < 128:
        return value | byte << 14, at + 3
    value, byte = value | (byte & 127) << 14, data[at + 3]
    if byte < 128:
        return value | byte << 21, at + 4
    value, byte = value | (byte & 127) << 21, data[at + 4]
    if byte < 128:
        return value | byte << 28, at + 5
    raise ValueError("a tag or a size without an end")


def _end_of_number(data: bytes, at: int) -> int:
    """Return the place behind the number that begins at a place. Raises ValueError."""
    found = _NUMBER.match(data, at)
    if found is None:
        raise ValueError("a number without an end")
    return found.end()


@cache
def _fields(message: Descriptor) -> dict[int, tuple[str, Descriptor | None]]:
    """Return the name of each field, and the message that it holds, by number."""
    return {field.number: (field.name, field.message_type) for field in message.fields}
