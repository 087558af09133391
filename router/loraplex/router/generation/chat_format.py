"""A chat's answer: what tells its reasoning and calls of tools apart, and the grammar of its calls or its format.

    required   start: reasoning? call+            auto   start: reasoning? (text up to a mark, call)* text
    format     start: reasoning? format

A call is written as the model's template writes it: JSON with a space behind commas and colons. Marks that are added
tokens of the tokenizer stand in the grammar as tokens, others as text. Format and grammar are functions of the request,
its chat template and the prompt's ids: a router that resumes the request finds the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.artifacts.peft_config import ToolCallFormat
from loraplex.contracts.grammars import GrammarError
from loraplex.contracts.grammars.build import GRAMMAR_BYTES, HEADER, behind_reasoning
from loraplex.contracts.grammars.json_schema import JsonStyle, check_schema
from loraplex.router.generation.chat_reader import ChatFormat
from loraplex.router.request import Chat, Tool, ToolMode
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import ModelTokenizer
from loraplex.runtime.rpc.errors import InvalidField

# Maximum number of characters of the paths that are told as not enforced: they go into headers.
_TOLD_CHARACTERS = 1_000
# Maximum number of parts of schemas that are freed one after the other, where a grammar cannot be compiled.
_FREED = 16
_ANY_OBJECT = f"%json {json.dumps(check_schema({'type': 'object'}, JsonStyle(), ''))}"
# Arguments of a tool that takes none.
_NO_ARGUMENTS = '{"type": "object", "additionalProperties": false}'
_ANY_TEXT = r"/(.|\n)*/"
# Maximum number of tools whose rules are kept for the next request.
_CACHED_FORMATS = 512


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The text around calls. `token_ids`: those of the marks that are tokens of their own.

    `ends_reasoning`: the mark behind a reasoning block in which the answer begins; `begins_reasoning`: one that it may
    begin with.
    """

    tool_format: ToolCallFormat
    token_ids: Mapping[str, int]
    named_first: bool = False
    begins_reasoning: str = ""
    ends_reasoning: str = ""

    def mark(self, text: str) -> str:
        """Return a mark as an item of a rule."""
        return f"<[{self.token_ids[text]}]>" if text in self.token_ids else json.dumps(text)

    def text_without(self, mark: str) -> str:
        """Return a terminal for any text; for one without the mark's letters where the mark is a token."""
        letters = re.escape(mark).replace("/", r"\/")
        return rf"{_ANY_TEXT} & ~/(.|\n)*{letters}(.|\n)*/" if mark in self.token_ids else _ANY_TEXT

    def text_up_to(self, rule: str, mark: str, then: str = "") -> str:
        """Return a rule for any text, the mark that ends it, and what follows."""
        if mark in self.token_ids:
            text = f"{rule.upper()}_TEXT"
            return f"{rule}: {text} {self.mark(mark)} {then}\n{text}: {self.text_without(mark)}\n"
        return f"{rule}: {rule}_mark {then}\n{rule}_mark[lazy]: {_ANY_TEXT} {self.mark(mark)}\n"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of an answer with calls; empty: none is needed.

    `free` has the paths of the parts of schemas that may be anything, since with them no grammar could be compiled, and
    `not_enforced` those of all parts that calls need not keep to.
    """

    text: str = ""
    free: frozenset[str] = frozenset()
    not_enforced: tuple[str, ...] = ()


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


_PARAMETERS = re.compile(r"chat\.tools\[\d+\]\.parameters")


def tool_grammar(chat: Chat, syntax: CallSyntax, tenant: str = "", free: Collection[str] = ()) -> CallGrammar:
    """Return the grammar of the answer to a chat with tools. Raises InvalidField, naming a keyword of a schema."""
    required = chat.tool_mode is ToolMode.REQUIRED
    several = chat.parallel_tool_calls and not chat.tool_name
    answer = {
        ToolCallFormat.HERMES: _hermes,
        ToolCallFormat.LLAMA3: _llama3,
        ToolCallFormat.MISTRAL: _mistral,
    }[syntax.tool_format](syntax, required=required, several=several)
    functions, rules = [], []
    not_enforced: list[str] = []
    for index, tool in enumerate(chat.tools):
        if chat.tool_name in ("", tool.name):
            functions.append(f"function_{index}")
            rules.append(f"function_{index}: {_function(tool, index, syntax)}\n")
            rule, left_out = _arguments(tool, f"chat.tools[{index}].parameters", tenant, free)
            rules.append(f"arguments_{index}: {rule}\n")
            not_enforced += left_out
    grammar = f"{HEADER}{_start(syntax, required=required)}{answer}function: {' | '.join(functions)}\n{''.join(rules)}"
    if len(grammar) > GRAMMAR_BYTES:
        large = InvalidField("chat.tools", f"make a grammar of {len(grammar)} bytes; at most {GRAMMAR_BYTES}")
        return tool_grammar(chat, syntax, tenant, free_parts(chat, free, large))
    ends = accumulate(map(len, not_enforced))
    told = tuple(path for path, end in zip(not_enforced, ends, strict=True) if end <= _TOLD_CHARACTERS)
    return CallGrammar(grammar, frozenset(free), told)


def _start(syntax: CallSyntax, *, required: bool) -> str:
    thought = syntax.text_up_to("thought", syntax.ends_reasoning, r"/\n{0,2}/") if syntax.ends_reasoning else ""
    if not thought:
        return "start: answer\n"
    if not syntax.begins_reasoning:
        return f"start: thought answer\n{thought}"
    if not required and syntax.begins_reasoning not in syntax.token_ids:  # an answer's text may have the block in it
        return "start: answer\n"
    return f"start: ({syntax.mark(syntax.begins_reasoning)} thought)? answer\n{thought}"


def _hermes(syntax: CallSyntax, *, required: bool, several: bool) -> str:
    ending = rf'"\n" function "\n" {syntax.mark("</tool_call>")}'
    return _answer(syntax, "<tool_call>", ending, r"/\n?/ ", required=required, several=several)


def _mistral(syntax: CallSyntax, *, required: bool, several: bool) -> str:
    if syntax.named_first:
        return _answer(syntax, "[TOOL_CALLS]", "function", "", required=required, several=several)
    more = _again(several, '", " function')
    ending = f'/ ?/ "[" function{more} "]"'
    return _answer(syntax, "[TOOL_CALLS]", ending, "", required=required, several=False)


def _llama3(syntax: CallSyntax, *, required: bool, several: bool) -> str:
    more = _again(several, '"; " function')
    calls = f"calls: function{more}\n"
    if required:
        return f"answer: calls\n{calls}"
    # An answer that begins with a brace calls a tool; <|python_tag|> is a special token where it is one at all.
    text = r"TEXT: /([ \n\r\t]*[^{ \n\r\t](.|\n)*)?/" + "\n"
    if "<|python_tag|>" not in syntax.token_ids:
        return f"answer: calls | TEXT\n{calls}{text}"
    tagged = f"tagged: {syntax.mark('<|python_tag|>')} calls\n"
    return f"answer: calls | tagged | TEXT\n{calls}{tagged}{text}"


def _answer(syntax: CallSyntax, mark: str, call: str, between: str, *, required: bool, several: bool) -> str:
    """Return the rules of an answer whose calls begin with a mark."""
    if required:
        return f"answer: call{_again(several, f'{between}call')}\ncall: {syntax.mark(mark)} {call}\n"
    answer = "answer: called* TEXT" if several else "answer: TEXT | called"
    return f"{answer}\nTEXT: {syntax.text_without(mark)}\n{syntax.text_up_to('called', mark, call)}"


def _again(several: bool, more: str) -> str:
    return f" ({more})*" if several else ""


def _function(tool: Tool, index: int, syntax: CallSyntax) -> str:
    if syntax.named_first and syntax.tool_format is ToolCallFormat.MISTRAL:
        return f"{json.dumps(tool.name)} {syntax.mark('[ARGS]')} arguments_{index}"
    key = "parameters" if syntax.tool_format is ToolCallFormat.LLAMA3 else "arguments"
    beginning = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
    return f'{beginning} arguments_{index} "}}"'


def _arguments(tool: Tool, path: str, tenant: str, free: Collection[str]) -> tuple[str, Sequence[str]]:
    """Return the rule of a tool's arguments, and the paths of what it leaves out. Raises InvalidField."""
    if path in free:
        return _ANY_OBJECT, (path,)
    own = frozenset(part for part in free if part.startswith(path))
    try:
        return _schema_rule(tenant, tool.parameters or _NO_ARGUMENTS, path, tool.strict, own)
    except (ArtifactError, GrammarError) as error:
        if not tool.strict:
            return _ANY_OBJECT, (path,)
        path = error.path if isinstance(error, GrammarError) else error.subject
        raise InvalidField(path, error.message, reason="INVALID_FORMAT") from error


def forget_tools() -> int:
    """Forget the rules of tools; returns how many there were."""
    count = _schema_rule.cache_info().currsize
    _schema_rule.cache_clear()
    return count


@lru_cache(_CACHED_FORMATS)
def _schema_rule(
    _tenant: str, parameters: str, path: str, strict: bool, free: frozenset[str]
) -> tuple[str, tuple[str, ...]]:
    """Return the rule of a tool's arguments, and the paths of what it leaves out; kept for the tenant.

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
    return f"%json {json.dumps(checked)}", tuple(left_out)


# Number of ids at the end of the prompt among which a template opens or closes a reasoning block.
_TAIL_IDS = 32


def chat_format(
    chat: Chat, template: ChatTemplate, tokenizer: ModelTokenizer, prompt_ids: tuple[int, ...], call_seed: str
) -> ChatFormat | None:
    """Return the format of the answer; None where it is text alone. `call_seed` makes the ids of its calls."""
    marks = template.reasoning_marks(chat)
    tools = template.tool_format(chat) if chat.tools else ToolCallFormat.NONE
    if marks is None and tools is ToolCallFormat.NONE:
        return None
    return ChatFormat(
        tool_calls=tools,
        tool_names=frozenset(tool.name for tool in chat.tools),
        reasoning=marks,
        begins_in_reasoning=marks is not None and _is_open(marks, _end_of_prompt(chat, tokenizer, prompt_ids)),
        call_seed=call_seed,
    )


def call_grammar(
    chat: Chat,
    template: ChatTemplate,
    tokenizer: ModelTokenizer,
    prompt_ids: tuple[int, ...],
    tenant: str = "",
    free: Collection[str] = (),
) -> CallGrammar:
    """Return the grammar of the answer to a chat with tools. Raises InvalidField."""
    form = chat_format(chat, template, tokenizer, prompt_ids, "")
    if not chat.tools:
        return CallGrammar()
    if form is None or form.tool_calls is ToolCallFormat.NONE:
        if chat.tool_mode is ToolMode.REQUIRED:
            message = "the chat template shows no format of calls that is known; name it in loraplex_chat.tool_calls"
            raise InvalidField("chat.tool_choice", message, reason="UNKNOWN_CALL_FORMAT")
        return CallGrammar()
    named_first = "[ARGS]" in template.source_for(chat)
    return tool_grammar(chat, _syntax(chat, form, tokenizer, prompt_ids, named_first=named_first), tenant, free)


def format_grammar(
    chat: Chat, template: ChatTemplate, tokenizer: ModelTokenizer, prompt_ids: tuple[int, ...], grammar: str
) -> str:
    """Return the grammar of an answer that reasons first, where the template knows how, and then keeps to a format."""
    form = chat_format(chat, template, tokenizer, prompt_ids, "")
    syntax = None if form is None else _syntax(chat, form, tokenizer, prompt_ids)
    if syntax is None or not syntax.ends_reasoning:
        return grammar
    return behind_reasoning(_start(syntax, required=True), grammar)


def behind_open_block(mark: str, token_id: int, grammar: str) -> str:
    """Return the grammar of a format behind a reasoning block that is open, and that a token ends."""
    syntax = CallSyntax(ToolCallFormat.NONE, {mark: token_id}, ends_reasoning=mark)
    return behind_reasoning(_start(syntax, required=True), grammar)


def _syntax(
    chat: Chat, form: ChatFormat, tokenizer: ModelTokenizer, prompt_ids: tuple[int, ...], *, named_first: bool = False
) -> CallSyntax:
    begins, ends = form.reasoning or ("", "")
    if form.begins_in_reasoning:
        begins = ""
    elif ends and (
        chat.continue_final_message
        or _end_of_prompt(chat, tokenizer, prompt_ids).rstrip().endswith(ends)  # the template leaves the reasoning out
        or _turned_off(chat)
    ):
        begins = ends = ""
    ids = {mark: token_id for mark in form.marks if (token_id := tokenizer.added_token(mark)) is not None}
    return CallSyntax(form.tool_calls, ids, named_first, begins, ends)


def _turned_off(chat: Chat) -> bool:
    """Tell whether the template's variables turn reasoning off."""
    arguments = json.loads(chat.template_args or "{}")
    switches = (arguments.get("enable_thinking"), arguments.get("thinking"))
    return False in switches or arguments.get("reasoning_effort") == "none"


def _end_of_prompt(chat: Chat, tokenizer: ModelTokenizer, prompt_ids: tuple[int, ...]) -> str:
    # A message that is continued may have opened a block long ago.
    tail = prompt_ids if chat.continue_final_message else prompt_ids[-_TAIL_IDS:]
    return tokenizer.decode(tail, skip_special_tokens=False)


def _is_open(marks: tuple[str, str], end_of_prompt: str) -> bool:
    return end_of_prompt.rfind(marks[0]) > end_of_prompt.rfind(marks[1])
