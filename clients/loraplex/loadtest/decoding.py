"""Decoding of a user's files into typed values; a mistake is one line that names the file and the key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

# Upper bounds keep infinity out.
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NotNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

T = TypeVar("T")


class PlanError(ValueError):
    """A load-test file, a trace, a flag or a report that can't be used: one line that names it."""


class Decoded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of what `convert` reads from tables; a subclass with a `tag` is chosen by the table's `kind`."""


def convert(value: Any, kind: type[T], source: str, *, strict: bool = True) -> T:
    """Convert a value from a TOML file or, not `strict`, from text. Raises PlanError naming `source` and the key."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        parts = (source, path.strip("`."), message[0].lower() + message[1:])
        raise PlanError(": ".join(part for part in parts if part)) from error


def read_lines(path: Path) -> Sequence[tuple[str, str]]:
    """Return a file's lines, without empty ones and comments, each with its place `file:line`. Raises PlanError."""
    lines = [(f"{path}:{number}", line.strip()) for number, line in enumerate(read_text(path).splitlines(), 1)]
    rows = [(place, line) for place, line in lines if line and not line.startswith("#")]
    if not rows:
        raise PlanError(f"{path}: the file is empty")
    return rows


def read_text(path: Path) -> str:
    """Return a file's text. Raises PlanError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: {(error.strerror or 'not readable').lower()}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not text in UTF-8") from error
