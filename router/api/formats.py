"""The format of a request as the grammar that its job carries; equal formats of a tenant are read once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from loraplex.inference.v1 import inference_pb2 as pb

from artifacts.grammars.build import choices_grammar, json_grammar, lark_grammar, regex_grammar
from artifacts.grammars.errors import GrammarError
from artifacts.grammars.json_schema import JsonStyle
from rpc.errors import InvalidField

# Maximum length of a format that is read on the event loop, in a few milliseconds.
_SHORT_CHARACTERS = 4_096
# Maximum number of grammars that are kept for the next request with the same format; each is some kilobytes, and its
# format 64 KiB at most.
_KEPT = 512


def read_format(spec: pb.GenerateSpec, tenant: str) -> tuple[str, str]:
    """Return the field that holds a request's format, and its grammar; both are empty without. Raises InvalidField."""
    field = spec.WhichOneof("format") or ""
    style = _style(spec)
    if style and field != "json_schema":
        raise InvalidField("json_style", "is for a json_schema alone")
    try:
        match field:
            case "json_schema":
                return field, _grammar(tenant, json_grammar, spec.json_schema, style or JsonStyle())
            case "regex":
                return field, _grammar(tenant, regex_grammar, spec.regex)
            case "grammar":
                return field, _grammar(tenant, lark_grammar, spec.grammar)
            case "choices":
                return "choices.values", _grammar(tenant, choices_grammar, tuple(spec.choices.values))
    except GrammarError as error:
        refused = InvalidField(error.path, error.message, reason="INVALID_FORMAT")
    else:
        return "", ""
    raise refused  # here, without what the traceback of the GrammarError holds: freeing it takes milliseconds


def is_large_format(spec: pb.GenerateSpec) -> bool:
    """Tell whether the format of a request takes long to read, some 100 ms."""
    return max(len(spec.json_schema), len(spec.regex), len(spec.grammar)) > _SHORT_CHARACTERS


def _style(spec: pb.GenerateSpec) -> JsonStyle | None:
    if not spec.HasField("json_style"):
        return None
    whitespace, order = spec.json_style.whitespace, spec.json_style.property_order
    if whitespace not in pb.JsonWhitespace.values():
        raise InvalidField("json_style.whitespace", f"{whitespace} is not known")
    if order not in pb.PropertyOrder.values():
        raise InvalidField("json_style.property_order", f"{order} is not known")
    return JsonStyle(whitespace == pb.JSON_WHITESPACE_FLEXIBLE, order == pb.PROPERTY_ORDER_SORTED)


# For each tenant: the time of a request must not tell what another has asked.
@lru_cache(_KEPT)
def _grammar(_tenant: str, make: Callable[..., str], *arguments: object) -> str:
    return make(*arguments)


def forget_formats() -> int:
    """Forget the formats that are kept; returns how many there were."""
    count = _grammar.cache_info().currsize
    _grammar.cache_clear()
    return count
