"""Builds the grammar of an answer that may call tools, in any format that is declared.

    required   start: reasoning? call+            auto   start: reasoning? (text up to a mark, call)* text
    a format   start: reasoning? (call+ | format)

A call is written as the model's template writes it: JSON with a space behind commas and colons. Of a schema whose
arguments are no JSON object, the properties stand in the schema's order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.chat_formats import NUMBER, CallFormat
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import GRAMMAR_BYTES, HEADER, behind_reasoning, escaped
from loraplex.contracts.grammars.json_schema import JsonStyle, check_schema
from loraplex.router.generation.chat_format import CallGrammar, CallSyntax, start_rules
from loraplex.router.request import Chat, Tool, ToolMode
from loraplex.runtime.rpc.errors import InvalidField
from loraplex.tool_calls.arguments import argument_rules

# Maximum number of characters of the paths that are told as not enforced: they go into headers.
_TOLD_CHARACTERS = 1_000
# Maximum number of parts of schemas that are freed one after the other, where a grammar cannot be compiled.
_FREED = 16
# A schema of any arguments, and the arguments of a tool that takes none.
_ANY_ARGUMENTS = '{"type": "object"}'
_NO_ARGUMENTS = '{"type": "object", "additionalProperties": false}'
# A number that a format puts into a call.
_NUMBER = "/[0-9]{1,4}/"
# Maximum number of tools whose rules are kept for the next request.
_CACHED_FORMATS = 512
_PARAMETERS = re.compile(r"chat\.tools\[\d+\]\.parameters")


def free_parts(chat: Chat, free: Collection[str], refused: InvalidField) -> frozenset[str]:
    """Return the parts of schemas that may be anything in the next try, where the grammar with `free` was refused.

    The part at fault is one more; where that is not known, the largest schemas, each time twice as many. Raises the
    refusal where the tool is strict, or where all parts are free.
    """
    whole = {f"chat.tools[{index}].parameters": tool for index, tool in enumerate(chat.tools) if not tool.strict}
    rest = sorted((path for path in whole if path not in free), key=lambda path: -len(whole[path].parameters))
    place = _PARAMETERS.match(refused.field)
    if place is None:
        chosen = rest[: max(1, len(whole) - len(rest))]
    elif place[0] not in rest:
        chosen = []
    elif len(free) >= _FREED:
        chosen = rest
    else:
        chosen = [place[0] if refused.field in free else refused.field]
    if not chosen:
        raise refused
    return frozenset(free).union(chosen)


def tool_grammar(
    chat: Chat, syntax: CallSyntax, tenant: str = "", free: Collection[str] = (), answer: str = ""
) -> CallGrammar:
    """Return the grammar of the answer to a chat with tools; `answer` is that of the format of one that calls none.

    Raises InvalidField, naming a keyword of a schema.
    """
    required = chat.tool_mode is ToolMode.REQUIRED
    several = chat.parallel_tool_calls and not chat.tool_name
    form = syntax.calls
    assert form is not None
    functions, rules = [], []
    not_enforced: list[str] = []
    for index, tool in enumerate(chat.tools):
        if chat.tool_name in ("", tool.name):
            functions.append(f"function_{index}")
            rule, left_out = _arguments(tool, index, syntax, tenant, free)
            rules.append(_function(tool, index, syntax, form, rule, whole=bool(answer) and form.opens[0] == "^"))
            not_enforced += left_out
    answers = _answers(syntax, form, required=required or bool(answer), several=several)
    formatted = ""
    if answer and not required:
        answers = f"answer: called | formatted\n{answers.replace('answer:', 'called:', 1)}"
        formatted = behind_reasoning("", answer, "formatted").removeprefix(HEADER)
    start = start_rules(syntax, required=required or bool(answer))
    grammar = f"{HEADER}{start}{answers}function: {' | '.join(functions)}\n{''.join(rules)}{formatted}"
    if len(grammar) > GRAMMAR_BYTES:
        large = InvalidField("chat.tools", f"make a grammar of {len(grammar)} bytes; at most {GRAMMAR_BYTES}")
        return tool_grammar(chat, syntax, tenant, free_parts(chat, free, large), answer)
    ends = accumulate(map(len, not_enforced))
    told = tuple(path for path, end in zip(not_enforced, ends, strict=True) if end <= _TOLD_CHARACTERS)
    return CallGrammar(grammar, frozenset(free), told)


def _function(tool: Tool, index: int, syntax: CallSyntax, form: CallFormat, rule: str, *, whole: bool) -> str:
    """Return the rules of a call of a tool; `rule` has those of its arguments.

    `whole`: the answer may be other JSON instead. Then a call that is an object has a schema of its own, since the text
    in front of its arguments would hide that text in the other.
    """
    if whole and form.keys and rule.startswith(f"arguments_{index}: %json "):
        (name, *_), (arguments, *_) = form.keys
        inner = rule.partition("%json ")[2].strip().replace('"$ref": "#', f'"$ref": "#/properties/{arguments}')
        schema = {
            "x-guidance": json.loads(inner)["x-guidance"],
            "type": "object",
            "properties": {name: {"const": tool.name}, arguments: json.loads(inner)},
            "required": [name, arguments],
            "additionalProperties": False,
        }
        return f"function_{index}: arguments_{index}\narguments_{index}: %json {json.dumps(schema)}\n"
    before = f"{form.call[0]}{tool.name}{form.call[1]}".split(NUMBER)
    items = f" {_NUMBER} ".join(map(syntax.mark, before))
    return f"function_{index}: {items} arguments_{index} {syntax.mark(form.call[2])}\n{rule}"


def _answers(syntax: CallSyntax, form: CallFormat, *, required: bool, several: bool) -> str:
    """Return the rules of an answer: of calls alone, or of text that may have calls."""
    before, between, behind = (_spaced(syntax, text) for text in form.calls)
    calls = f"{before} function{_again(several, f'{between} function')} {behind}" if form.shared else "function"
    rest = f"{calls} {syntax.mark(form.closes)}"
    if form.opens[0] == "^":
        return _begun_by_calls(syntax, form, calls, required=required)
    mark = form.opens[0].lstrip("^")
    several = several and not form.shared
    if required:
        return f"answer: call{_again(several, f'{between} call')}\ncall: {syntax.mark(mark)} {rest}\n"
    answer = "answer: called* text" if several else "answer: text | called"
    return f"{answer}\n{syntax.text('text', mark)}{syntax.text_up_to('called', mark, rest)}"


def _begun_by_calls(syntax: CallSyntax, form: CallFormat, calls: str, *, required: bool) -> str:
    """Return the rules of an answer that calls tools where it begins as a call does."""
    if required:
        return f"answer: calls\ncalls: {calls}\n"
    first = escaped((form.calls[0] + form.call[0]).lstrip()[0])
    text = rf"TEXT: /([ \n\r\t]*[^{first} \n\r\t](.|\n)*)?/" + "\n"
    # Further openings are special tokens where they are tokens at all.
    tags = [mark for mark in form.opens[1:] if mark in syntax.token_ids]
    tagged = f"tagged: ({' | '.join(map(syntax.mark, tags))}) calls\n" if tags else ""
    return f"answer: calls | {'tagged | ' if tags else ''}TEXT\ncalls: {calls}\n{tagged}{text}"


def _spaced(syntax: CallSyntax, text: str) -> str:
    """Return the items of a text; space alone, and space in front, may be missing."""
    space = text[: len(text) - len(text.lstrip())]
    optional = bool(space) and (not text.strip() or "\n" not in space)
    return f"{json.dumps(space)}? {syntax.mark(text.lstrip())}" if optional else syntax.mark(text)


def _again(several: bool, more: str) -> str:
    return f" ({more})*" if several else ""


def _arguments(
    tool: Tool, index: int, syntax: CallSyntax, tenant: str, free: Collection[str]
) -> tuple[str, Sequence[str]]:
    """Return the rules of a tool's arguments, and the paths of what they leave out. Raises InvalidField."""
    path, name = f"chat.tools[{index}].parameters", f"arguments_{index}"
    others = syntax if syntax.calls and syntax.calls.arguments != "json" else None
    own = frozenset(part for part in free if part.startswith(path) and part != path)
    try:
        if path not in free:
            return _schema_rules(tenant, name, tool.parameters or _NO_ARGUMENTS, path, tool.strict, own, others)
    except (ArtifactError, GrammarError) as error:
        if tool.strict:
            path = error.path if isinstance(error, GrammarError) else error.subject
            raise InvalidField(path, error.message, reason="INVALID_FORMAT") from error
    return _schema_rules("", name, _ANY_ARGUMENTS, path, False, frozenset(), others)[0], (path,)


def forget_tools() -> int:
    """Forget the rules of tools; returns how many there were."""
    count = _schema_rules.cache_info().currsize
    _schema_rules.cache_clear()
    return count


@lru_cache(_CACHED_FORMATS)
def _schema_rules(
    _tenant: str, name: str, parameters: str, path: str, strict: bool, free: frozenset[str], syntax: CallSyntax | None
) -> tuple[str, tuple[str, ...]]:
    """Return the rules of a tool's arguments, and the paths of what they leave out; kept for the tenant.

    Raises ArtifactError or GrammarError.
    """
    schema, left_out = parse_object(parameters.encode(), path), list[str]()
    kinds = schema.get("type") or "object"
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        if strict:
            raise GrammarError(f"{path}.type", "is not object, which arguments are")
        left_out.append(f"{path}.type")
    schema["type"] = "object"
    checked = check_schema(schema, JsonStyle(), path, None if strict else left_out, free)
    if syntax is None:  # arguments are a JSON object
        return f"{name}: %json {json.dumps(checked)}\n", tuple(left_out)
    rules = argument_rules(name, checked, syntax, path, None if strict else left_out)
    return rules, tuple(left_out)
