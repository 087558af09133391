"""Parses JSON from outside strictly: every process accepts and refuses the same bytes."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_MAX_DEPTH = 64
# Maximum number of values in a text. The interpreter reads so many, in some 0.1 s, in one call, during which no other
# thread of the process runs.
VALUES = 250_000


def parse_bounded(data: bytes, values: int = VALUES, **options: Any) -> Any:
    """Parse JSON in UTF-8 as json.loads does. Raises ValueError, also for too many values, and RecursionError."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > values:
        raise ValueError(f"more than {values} values")
    return json.loads(data.decode("utf-8"), **options)


def parse_object(data: bytes, values: int = VALUES) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises ValueError, also on NaN, on a repeated key and where it is nested deeply."""
    options: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite}
    try:
        value = parse_bounded(data, values, **options, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError too
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    # Far below the interpreter's own limit, which depends on the caller's stack.
    if not _is_shallow(value, _MAX_DEPTH):
        raise ValueError("is nested too deeply")
    return value


def _is_shallow(value: Any, levels: int) -> bool:
    inner = [value]
    for _ in range(levels):
        items = (
            item for container in inner for item in (container.values() if isinstance(container, dict) else container)
        )
        inner = [item for item in items if isinstance(item, (dict, list))]
        if not inner:
            return True
    return False


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is given twice")
    return value
