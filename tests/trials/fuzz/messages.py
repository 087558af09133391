"""Changes messages field by field, so that most of what is made can be read and reaches the code behind the reader."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = (0, 1, -1, 2, 16, 255, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
_NUMBERS = (0.0, -1.0, 1e-45, 0.5, 1e30, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    "\0",
    "a\nb\x1b[2J",
    "\u202e",
    "é" * 300,
    "a" * 70_000,
    "tenants/acme/adapters/a",
    "a@live",
    "*",
    "-",
    "{}",
    '{"type": "string"}',
    "[" * 1_000,
    "1e999",
    "{{ messages }}",
    "start: start",
    "(a*)*b",
)
_VALUES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_STRING: _TEXTS,
    FieldDescriptor.CPPTYPE_DOUBLE: _NUMBERS,
    FieldDescriptor.CPPTYPE_FLOAT: _NUMBERS,
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
}
_RANGES: dict[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
# Maximum number of entries that a repeated field gets in one change.
_ENTRIES = (1, 2, 17, 300)
# Fraction of values of MessagePack that are replaced as a whole, or by one of another type.
_REPLACED = 0.1
# Maximum number of messages in each other that are changed.
DEPTH = 5


def change_message(message: Message, draw: random.Random, depth: int = 0) -> None:
    """Change one field, which may lie in a message within, down to DEPTH messages in each other."""
    if not message.DESCRIPTOR.fields or depth > DEPTH:
        return
    field: Any = draw.choice(message.DESCRIPTOR.fields)
    name, is_map = field.name, field.message_type is not None and field.message_type.GetOptions().map_entry
    if draw.random() < 0.1:
        message.ClearField(name)
    elif is_map:
        _put(getattr(message, name), field.message_type, draw, depth + 1)
    elif field.is_repeated:
        _extend(getattr(message, name), field, draw, depth + 1)
    elif field.message_type is not None:
        inner = getattr(message, name)
        inner.SetInParent()
        change_message(inner, draw, depth + 1)
    else:
        setattr(message, name, _value(field, draw))


def changed_value(value: Any, draw: random.Random) -> Any:
    """Return a value of MessagePack with one value in it changed, left out or doubled."""
    if value and isinstance(value, dict) and draw.random() > _REPLACED:
        key = draw.choice(list(value))
        changed = {**value, key: changed_value(value[key], draw)}
        if draw.random() < _REPLACED:
            changed.pop(key)
        return changed
    if value and isinstance(value, list) and draw.random() > _REPLACED:
        at = draw.randrange(len(value))
        return [*value[:at], changed_value(value[at], draw), *value[at + draw.randrange(2) :]]
    if isinstance(value, bytes):
        return draw.choice(_TEXTS).encode()
    if isinstance(value, str) and draw.random() > _REPLACED:
        return draw.choice(_TEXTS)
    if draw.random() < _REPLACED:  # by a value of another type
        return draw.choice((None, True, [], {}, [value] * 3, {"parts": [value]}, *_NUMBERS))
    return draw.choice((*_INTEGERS, 2**64 - 1))


def _put(entries: Any, entry: Any, draw: random.Random, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    if value.message_type is not None:
        change_message(entries[_value(key, draw)], draw, depth)
    else:
        entries[_value(key, draw)] = _value(value, draw)


def _extend(values: Any, field: FieldDescriptor, draw: random.Random, depth: int) -> None:
    if len(values) and draw.random() < 0.5:
        del values[draw.randrange(len(values))]
    for _ in range(draw.choice(_ENTRIES)):
        if field.message_type is not None:
            change_message(values.add(), draw, depth)
        else:
            values.append(_value(field, draw))


def _value(field: FieldDescriptor, draw: random.Random) -> Any:
    if field.enum_type is not None:
        return draw.choice((*(value.number for value in field.enum_type.values), 99))
    value: Any = draw.choice(_VALUES.get(field.cpp_type, _INTEGERS))
    if field.cpp_type in _RANGES:
        least, most = _RANGES[field.cpp_type]
        return max(least, min(value, most))
    return value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
