"""Bodies of requests, validated by the types that the protocols' own packages declare; nothing is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails, SchemaValidator, ValidationError

from clients.gateway.errors import HttpError, invalid
from clients.gateway.json_size import check_json_size
from clients.gateway.strict_schemas import UNKNOWN_KIND, strict_schema

# Maximum length in characters of a value that an error shows.
_SHOWN = 60


class Body:
    """Validates bodies of one kind, a TypedDict. `added` are further fields of TypedDicts in it, each a string."""

    def __init__(self, kind: Any, added: Mapping[type, Sequence[str]] | None = None) -> None:
        self._validator = SchemaValidator(strict_schema(kind, added or {}))

    def read(self, body: bytes) -> dict[str, Any]:
        """Return the fields of a body. Raises HttpError naming one that is wrong."""
        check_json_size(body)
        try:
            found: dict[str, Any] = self._validator.validate_json(body, strict=True)
        except ValidationError as error:
            raise _told(error.errors(include_url=False)) from None
        return found


def _told(errors: Sequence[ErrorDetails]) -> HttpError:
    """Return the error to tell: of a value that may be of several types, the one that is deepest inside it."""
    error = max(errors, key=lambda error: len(_path(error)))
    path, kind = _path(error), error["type"]
    if kind == "json_invalid":
        return HttpError(400, "invalid_json", f"the body is not JSON: {error['ctx']['error']}")
    if not path:
        return HttpError(400, "invalid_json", "the body is not a JSON object, or has too many fields")
    if kind == "extra_forbidden":
        return HttpError(400, "unknown_parameter", f"{path}: unknown parameter", path)
    if kind == "missing":
        return HttpError(400, "missing_required_parameter", f"{path}: is required", path)
    if kind == UNKNOWN_KIND:
        return _unknown_kind(path, error)
    return invalid(path, error["msg"][0].lower() + error["msg"][1:])


def _unknown_kind(path: str, error: ErrorDetails) -> HttpError:
    """Return the error of an object whose `role` or `type` is no known one."""
    if not isinstance(error["input"], dict):
        return invalid(path, "is not an object")
    tag = error["ctx"]["field"]
    if tag not in error["input"]:
        return HttpError(400, "missing_required_parameter", f"{path}.{tag}: is required", f"{path}.{tag}")
    given = error["input"][tag]
    shown = repr(given[:_SHOWN]) if isinstance(given, str) else "the value"
    return invalid(f"{path}.{tag}", f"{shown} is none that it may have")


def _path(error: ErrorDetails) -> str:
    """Return a place as `messages[0].content`, without the names of unions' branches."""
    loc, path = error["loc"], ""
    for at, part in enumerate(loc):
        if isinstance(part, int):
            path += f"[{part}]"
        elif _is_field(part) or (error["type"] == "extra_forbidden" and at == len(loc) - 1):
            shown = part[:_SHOWN]
            path += f".{shown}" if path else shown
    return path


def _is_field(part: str) -> bool:
    return not (part[:1].isupper() or "[" in part or part in _BRANCHES or part.startswith("function-"))


# Names that pydantic gives to branches of plain types.
_BRANCHES = frozenset({"str", "int", "float", "bool", "nullable", "dict", "list", "tagged-union"})
