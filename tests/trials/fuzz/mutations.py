"""Makes bytes out of others, by a seeded draw: the plain way to fuzz, without coverage as a guide."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from tests.trials.fuzz.messages import change_message, changed_value

# Bytes that readers often take for something: lengths, ends, signs, quotes, brackets, halves of surrogates.
_WORDS = (
    b"\x00",
    b"\xff",
    b"\xff" * 8,
    b"\x7f",
    b"\x80",
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"9" * 400,
    b'"',
    b"\\",
    b"\\ud800",
    b"\xed\xa0\x80",
    b"[" * 200,
    b"{",
    b"}",
    b"null",
    b"true",
    b"\n",
    b"\x1b[2J",
    b"..",
    b"/",
    b"(?:",
    b"){99}",
    b"*",
    b"\xe2\x80\xae",
)
# Maximum number of changes between a seed and what is made of it.
_CHANGES = 4
# Fraction of texts with fields whose bytes are changed rather than their fields.
_BYTES = 0.2
# Share of what is made that others are made of in turn, and its maximum size in bytes.
_KEPT, _KEPT_BYTES = 0.02, 4096


def mutants(
    seeds: Sequence[bytes],
    words: Sequence[bytes],
    draw: random.Random,
    change: Callable[[bytes, random.Random], bytes] | None = None,
) -> Iterator[bytes]:
    """Yield bytes without end, each made of a seed by a few changes, mostly to its fields where it has some."""
    pool, words = list(seeds), [*_WORDS, *words]
    while True:
        made = draw.choice(pool)
        if change is not None and draw.random() > _BYTES:
            made = change(made, draw)
        else:
            made = _changed_bytes(made, draw, pool, words)
        if draw.random() < _KEPT and len(made) < _KEPT_BYTES:
            pool.append(made)
        yield made


def changed_message(kind: type[Message], data: bytes, draw: random.Random) -> bytes:
    """Return the bytes of a message with a few fields changed; bytes that are none count as an empty message."""
    message: Any = kind()
    try:
        message.ParseFromString(data)
    except (DecodeError, ValueError):
        message.Clear()
    for _ in range(draw.randint(1, _CHANGES)):
        change_message(message, draw)
    made: bytes = message.SerializeToString()
    return made


def changed_record(data: bytes, draw: random.Random) -> bytes:
    """Return MessagePack with a few values in it changed; bytes that are none count as an empty map."""
    try:
        value = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError):
        value = {}
    for _ in range(draw.randint(1, _CHANGES)):
        value = changed_value(value, draw)
    return msgspec.msgpack.encode(value)


def _changed_bytes(made: bytes, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    data = bytearray(made)
    for _ in range(draw.randint(1, _CHANGES)):
        _change(data, draw, pool, words)
    return bytes(data)


def _change(data: bytearray, draw: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = draw.randint(0, len(data))
    end = min(len(data), at + draw.choice((1, 1, 2, 4, 16, 64)))
    match draw.randint(0, 6):
        case 0 if at < len(data):
            data[at] = draw.randrange(256)
        case 1 if at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        case 2:
            del data[at:end]
        case 3:
            data[at:at] = data[at:end] * draw.choice((1, 2, 50))
        case 4:
            data[at:end] = draw.choice(words)
        case 5:
            data[at:at] = draw.choice(words)
        case _:
            other = draw.choice(pool)
            data[at:] = other[draw.randint(0, len(other)) :]
