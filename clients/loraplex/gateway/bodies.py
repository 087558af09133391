"""Bodies of requests, validated by the TypedDicts of their protocols; nothing is converted."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import ErrorDetails, PydanticCustomError, SchemaValidator, ValidationError, core_schema

from loraplex.gateway.errors import HttpError, invalid

# Maximum length in characters of a value that an error shows.
_SHOWN = 60
# Maximum number of objects and lists of a body, of strings, names of fields included, and of all values: about 0.1 s of
# parsing for objects and lists, between which it gives way to the event loop, and 50 ms for other values. Routers take
# messages of 10,000 fields, and a list of numbers is one.
CONTAINERS, STRINGS, VALUES = 20_000, 100_000, 400_000
# Types of the errors that these schemas add: an object of no known kind; an object with too many fields.
UNKNOWN_KIND, TOO_MANY = "unknown_kind", "too_many_fields"
# Maximum number of fields of an object, and of keys of a mapping; values that may be anything have no limit.
_FIELDS, _KEYS = 128, 1_024
# Unknown fields whose false asks for nothing: it is the default of vLLM, SGLang or llama.cpp, whose clients send it.
_FALSE = ("no_stop_trim", "return_hidden_states", "return_progress", "return_token_ids", "timings_per_token")
# Fields that tell kinds of objects apart.
_TAGS = ("role", "type")


class Body:
    """Validates bodies of one kind, a TypedDict.

    Unknown fields of the TypedDicts `lenient` in it are ignored, as are those of objects in these: messages have what
    clients keep with them, and answers of any server are sent back.
    """

    def __init__(self, kind: Any, lenient: Collection[type] = ()) -> None:
        self.kind = kind
        self._validator = SchemaValidator(strict_schema(kind, lenient))

    def read(self, body: bytes) -> dict[str, Any]:
        """Return the fields of a body. Raises HttpError naming one that is wrong."""
        body = body.removeprefix(BOM_UTF8)
        check_json_size(body)
        try:
            fields: dict[str, Any] = self._validator.validate_json(body, strict=True)
        except ValidationError as error:
            raise _first_error(error.errors(include_url=False)) from None
        return fields


def _first_error(errors: Sequence[ErrorDetails]) -> HttpError:
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
    value = error["input"][tag]
    shown = repr(value[:_SHOWN]) if isinstance(value, str) else "the value"
    return invalid(f"{path}.{tag}", f"{shown} is not one of {error['ctx']['kinds']}")


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


def check_json_size(body: bytes) -> None:
    """Raise HttpError where a JSON text has more values than are parsed.

    Four megabytes of small objects and lists take seconds to parse, of any characters milliseconds.
    """
    if body.count(b'"') > 2 * STRINGS:
        body = _without_escapes(body)
        if body.count(b'"') > 2 * STRINGS:
            raise _too_many(STRINGS, "strings")
    if _containers(body) <= CONTAINERS and body.count(b",") < VALUES:
        return
    # Count again without the characters of strings: between quotes, every other piece is outside of strings.
    body = b"".join(_without_escapes(body).split(b'"')[::2])
    if _containers(body) > CONTAINERS:
        raise _too_many(CONTAINERS, "objects and lists")
    if body.count(b",") >= VALUES:
        raise _too_many(VALUES, "values")


def _without_escapes(body: bytes) -> bytes:
    """Return a JSON text whose quotes are the ends of strings alone."""
    return body.replace(rb"\\", b"").replace(rb"\"", b"")


def _containers(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _too_many(most: int, what: str) -> HttpError:
    return HttpError(400, "invalid_json", f"the body has more than {most} {what}")


def strict_schema(kind: Any, lenient: Collection[type]) -> core_schema.CoreSchema:
    """Return the schema of a TypedDict for Body."""
    schema: Any = TypeAdapter(kind).core_schema
    definitions = {part["ref"]: part for part in schema.get("definitions", ())}
    strict: core_schema.CoreSchema = _Strict(definitions, lenient).node(schema)
    return strict


class _Strict:
    """Transforms the nodes of a TypedDict's schema into one for bodies of anybody.

    unknown fields     refused, at every level, unless they ask for nothing: null or empty
    optional fields    unset where they are null
    iterables          read as lists, whose first bad item is the only one that is told
    unions of objects  told apart by their `role` or `type` alone, instead of by trying each; one kind may leave it out,
                       and one that takes any further fields is of all other values, so that an error can name them
    objects            of at most so many fields, since each field that is unknown is an error
    """

    def __init__(self, definitions: Mapping[str, Any], lenient: Collection[type]) -> None:
        self._definitions = definitions
        self._lenient_kinds = lenient
        # Whether the node is in an object of these kinds.
        self._lenient = False

    def node(self, node: Any) -> Any:
        """Return a node made strict."""
        if isinstance(node, list | tuple):
            return type(node)(map(self.node, node))
        if not isinstance(node, dict):
            return node
        if node.get("type") == "union" and (tagged := self._tagged(node)) is not None:
            return tagged
        outer = self._lenient
        self._lenient = outer or (node.get("type") == "typed-dict" and node.get("cls") in self._lenient_kinds)
        try:
            return self._bounded({key: value if key == "metadata" else self.node(value) for key, value in node.items()})
        finally:
            self._lenient = outer

    def _bounded(self, strict: dict[str, Any]) -> Any:
        """Return a node, whose parts are strict, that bounds the number of its errors."""
        kind = strict.get("type")
        if kind == "typed-dict" and not _takes_any(strict):
            return self._object(strict)
        if kind in ("generator", "list"):
            return {**strict, "type": "list", "fail_fast": True}
        if kind == "dict" and strict.get("values_schema", {}).get("type") != "any":
            return core_schema.no_info_before_validator_function(_at_most(_KEYS), strict)
        return strict

    def _object(self, strict: dict[str, Any]) -> Any:
        strict["extra_behavior"] = "forbid"
        ref = strict.pop("ref", None)
        required = {name: bool(field.get("required")) for name, field in strict["fields"].items()}
        return core_schema.no_info_before_validator_function(_asked(required, self._lenient), strict, ref=ref)

    def _tagged(self, union: Mapping[str, Any]) -> Any:
        """Return a union whose objects are told apart by a tag; None where they are not, or there is but one."""
        choices = [choice for choice in _choices(union) if not self._is_model(choice)]
        kinds = [choice for choice in choices if self._resolved(choice)["type"] == "typed-dict"]
        others = [choice for choice in choices if choice not in kinds]
        rest = [choice for choice in kinds if _takes_any(self._resolved(choice))]
        objects = [choice for choice in kinds if choice not in rest]
        for tag in _TAGS:
            values = [self._values(choice, tag) for choice in objects]
            untagged = [
                of_choice[0]
                for choice, of_choice in zip(objects, values, strict=True)
                if of_choice and not self._requires(choice, tag)
            ]
            if len(kinds) > 1 and len(rest) <= 1 and all(values) and len(untagged) <= 1:
                named = {
                    _branch(value): self.node(choice)
                    for choice, of_choice in zip(objects, values, strict=True)
                    for value in of_choice
                }
                more = {_REST: self.node(rest[0])} if rest else {}
                tagged = core_schema.tagged_union_schema(
                    named | more,
                    _reader(tag, untagged, named if rest else None),
                    custom_error_type=UNKNOWN_KIND,
                    custom_error_message="{field}: is not one of {kinds}",
                    custom_error_context={"field": tag, "kinds": ", ".join(value for of in values for value in of)},
                )
                return core_schema.union_schema([*map(self.node, others), tagged]) if others else tagged
        return None

    def _is_model(self, choice: Any) -> bool:
        resolved = self._resolved(choice)
        if resolved["type"] == "union":
            return all(map(self._is_model, _choices(resolved)))
        return bool(resolved["type"] == "model")

    def _resolved(self, choice: Any) -> Any:
        return self._definitions[choice["schema_ref"]] if choice["type"] == "definition-ref" else choice

    def _values(self, choice: Any, tag: str) -> Sequence[str]:
        """Return the values of the tag of a kind of objects; empty where it may have any, or has no such field."""
        schema = self._resolved(choice)["fields"].get(tag, {}).get("schema", {})
        schema = schema.get("schema", schema)  # of one that may be null
        values: Sequence[str] = schema["expected"] if schema.get("type") == "literal" else ()
        return values

    def _requires(self, choice: Any, tag: str) -> bool:
        return bool(self._resolved(choice)["fields"][tag].get("required"))


def _choices(union: Mapping[str, Any]) -> list[Any]:
    return [choice[0] if isinstance(choice, tuple) else choice for choice in union["choices"]]


def _takes_any(strict: Mapping[str, Any]) -> bool:
    """Return whether a TypedDict says itself that it takes further fields, as a JSON schema's does."""
    own = strict.get("extra_behavior") or strict.get("config", {}).get("extra_fields_behavior")
    return bool(own == "allow")


# Name of the branch of objects whose tag has another value.
_REST = "Rest"


def _branch(value: str) -> str:
    """Return the name of a union's branch, which cannot be that of a field."""
    return f"Kind {value}"


def _reader(tag: str, untagged: Sequence[str], known: Collection[str] | None) -> Callable[[Any], str | None]:
    """Return a function that names the branch of an object: by its tag or, of one without any, the untagged one.

    With the `known` branches it is _REST of all others.
    """

    def read(value: Any) -> str | None:
        kind = value.get(tag) if isinstance(value, dict) else None
        if kind is None and isinstance(value, dict):
            kind = next(iter(untagged), None)
        if not isinstance(kind, str):
            return None
        branch = _branch(kind)
        return branch if known is None or branch in known else _REST

    return read


def _asked(required: Mapping[str, bool], lenient: bool) -> Callable[[Any], Any]:
    """Return a function that drops the fields of an object that ask for nothing; `required` has the known fields.

    Clients send all fields of their own types, and other servers' fields in answers that they send back.
    """

    def is_dropped(name: str, value: Any) -> bool:
        if name in required:
            return value is None and not required[name]
        if value is False:
            return lenient or name in _FALSE
        return lenient or value is None or (isinstance(value, str | list | dict) and not value)

    def check(value: Any) -> Any:
        if not isinstance(at_most(value), dict):
            return value
        return {name: content for name, content in value.items() if not is_dropped(name, content)}

    at_most = _at_most(_FIELDS)
    return check


def _at_most(limit: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError(TOO_MANY, "has more than {limit} fields", {"limit": limit})
        return value

    return check
