"""A chat's answer: what tells its reasoning and calls of tools apart, and the grammar of its calls or its format.

    format     start: reasoning? format               budget     start: reasoning[max_tokens]? (text or format)

The grammar of calls is made by the package TOOL_CALLS. Marks that are added tokens of the tokenizer stand in a grammar
as tokens, others as text. Format and grammar are functions of the request,
its chat template and the prompt's ids: a router that resumes the request finds the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from typing import Any

from loraplex.contracts.artifacts.chat_formats import MARK, CallFormat, ReasoningFormat
from loraplex.contracts.grammars.build import HEADER, behind_reasoning, escaped
from loraplex.router.generation.chat_reader import TOOL_CALLS, ChatFormat
from loraplex.router.request import Chat, Request, ToolMode
from loraplex.router.text.chat import ChatTemplate
from loraplex.router.text.tokenizer import ModelTokenizer
from loraplex.runtime.rpc.errors import InvalidField

BUDGET = "chat.thinking_token_budget"
ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The text around calls. `token_ids`: those of the marks that are tokens of their own.

    `ends_reasoning`: the mark behind a reasoning block in which the answer begins; `begins_reasoning`: one that it may
    begin with, or that may stand `anywhere`. `hides`: texts that are not shown. `budget`: maximum tokens of reasoning.
    """

    calls: CallFormat | None
    token_ids: Mapping[str, int]
    begins_reasoning: str = ""
    ends_reasoning: str = ""
    hides: tuple[str, ...] = ()
    anywhere: bool = False
    budget: int | None = None

    def __hash__(self) -> int:
        """Return the hash of its values, where `token_ids` has them too."""
        return hash((self.calls, *self.token_ids.items(), self.begins_reasoning, self.ends_reasoning, self.budget))

    def mark(self, text: str) -> str:
        """Return a text as items of a rule: marks that are tokens, and others."""
        parts = (part for part in re.split(f"({MARK.pattern})", text) if part)
        runs = groupby(parts, key=self.token_ids.get)
        return " ".join(f"<[{token}]>" if token is not None else json.dumps("".join(run)) for token, run in runs)

    def is_token(self, text: str) -> bool:
        """Tell whether a text begins with a token of its own."""
        return self.mark(text).startswith("<[")

    def text_without(self, mark: str) -> str:
        """Return a terminal for any text; for one without the mark's letters where the mark is a token."""
        return rf"{ANY_TEXT} & ~/(.|\n)*{escaped(mark)}(.|\n)*/" if self.is_token(mark) else ANY_TEXT

    def hidden(self) -> list[str]:
        """Return the items of what may stand in a text and is not shown: marks that are tokens, and reasoning."""
        items = [self.mark(text) for text in self.hides if self.is_token(text)]
        is_block = self.anywhere and self.begins_reasoning and self.is_token(self.begins_reasoning)
        return [*items, *([f"{self.mark(self.begins_reasoning)} thought"] if is_block else ())]

    def text(self, rule: str, mark: str, limit: str = "") -> str:
        """Return a rule, with its limit, for any text with what is not shown in it, without a mark that is a token."""
        letters, hidden = f"{rule.upper()}_TEXT", self.hidden()
        body = f"({' | '.join((letters, *hidden))})*" if hidden else letters
        return f"{rule}{limit}: {body}\n{letters}: {self.text_without(mark)}\n"

    def text_up_to(self, rule: str, mark: str, then: str = "", limit: str = "") -> str:
        """Return a rule for any text, the mark that ends it, and what follows; `limit` needs a mark that is a token."""
        if self.is_token(mark):
            return f"{rule}: {rule}_text {self.mark(mark)} {then}\n{self.text(f'{rule}_text', mark, limit)}"
        return f"{rule}: {rule}_mark {then}\n{rule}_mark[lazy]: {ANY_TEXT} {self.mark(mark)}\n"


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of an answer with calls; empty: none is needed.

    `free` has the paths of the parts of schemas that may be anything, since with them no grammar could be compiled, and
    `not_enforced` those of all parts that calls need not keep to.
    """

    text: str = ""
    free: frozenset[str] = frozenset()
    not_enforced: tuple[str, ...] = ()


def tool_calls() -> Any:
    """Return the package that reads calls and has their grammars."""
    return import_module(TOOL_CALLS)


def start_rules(syntax: CallSyntax, *, required: bool) -> str:
    """Return the rules of what comes before an answer, which is the rule `answer`; `required`: it is no free text."""
    hidden = [syntax.mark(text) for text in syntax.hides if required and syntax.is_token(text)]
    answer = f"({' | '.join(hidden)})* answer" if hidden else "answer"
    begins, thought = syntax.begins_reasoning, _thought(syntax)
    if not thought:
        return f"start: {answer}\n"
    if not begins:
        return f"start: thought {answer}\n{thought}"
    if not required and not syntax.is_token(begins):  # an answer's text may have the block in it
        if syntax.budget is not None:
            raise _no_budget(begins)
        return f"start: {answer}\n"
    return f"start: ({syntax.mark(begins)} thought)? {answer}\n{thought}"


def _thought(syntax: CallSyntax) -> str:
    """Return the rule `thought`, of reasoning and the mark that ends it; empty where no block can come."""
    ends, then = syntax.ends_reasoning, r"/\n{0,2}/"
    if not ends:
        return ""
    if syntax.budget is not None and not syntax.is_token(ends):
        raise _no_budget(ends)
    if syntax.budget == 0:
        return f"thought: {syntax.mark(ends)} {then}\n"
    # llguidance ends a rule of one terminal after so many tokens.
    limit = "" if syntax.budget is None else f"[max_tokens={syntax.budget}]"
    return replace(syntax, hides=(), anywhere=False).text_up_to("thought", ends, then, limit)


def _no_budget(mark: str) -> InvalidField:
    return InvalidField(BUDGET, f"{mark!r} is not a token of the model; leave the budget out")


def grammar_field(request: Request) -> str:
    """Return the path of the field for which an answer has a grammar."""
    has_tools = isinstance(request.prompt, Chat) and request.prompt.tools
    return request.format_field or ("chat.tools" if has_tools else BUDGET)


# Number of ids at the end of the prompt among which a template opens or closes a reasoning block.
_TAIL_IDS = 32


def chat_format(
    chat: Chat, template: ChatTemplate, tokenizer: ModelTokenizer, prompt_ids: tuple[int, ...], call_seed: str
) -> ChatFormat | None:
    """Return the format of the answer; None where it is text alone. `call_seed` makes the ids of its calls."""
    reasoning = template.reasoning_format(chat)
    calls = template.call_format(chat) if chat.tools else None
    if reasoning is None and calls is None:
        return None
    typed = calls is not None and calls.arguments == "text"
    return ChatFormat(
        calls=calls,
        tools={tool.name: tool_calls().types_of(tool.parameters) if typed else {} for tool in chat.tools},
        reasoning=reasoning,
        begins_in_reasoning=reasoning is not None and _is_open(reasoning, _end_of_prompt(chat, tokenizer, prompt_ids)),
        call_seed=call_seed,
    )


def call_grammar(
    chat: Chat,
    template: ChatTemplate,
    tokenizer: ModelTokenizer,
    prompt_ids: tuple[int, ...],
    tenant: str = "",
    free: Collection[str] = (),
    answer: str = "",
) -> CallGrammar:
    """Return the grammar of the answer to a chat with tools; `answer` is that of the format of one that calls none.

    Raises InvalidField.
    """
    form = chat_format(chat, template, tokenizer, prompt_ids, "")
    if chat.thinking_token_budget is not None and (form is None or form.reasoning is None):
        message = "the chat template shows no reasoning; leave it out, or name the marks in loraplex_chat.reasoning"
        raise InvalidField(BUDGET, message)
    if not chat.tools:
        return CallGrammar(format_grammar(chat, template, tokenizer, prompt_ids, answer))
    if form is None or form.calls is None:
        if chat.tool_mode is ToolMode.REQUIRED:
            message = "the chat template shows no format of calls that is known; name it in loraplex_chat.tool_calls"
            raise InvalidField("chat.tool_choice", message, reason="UNKNOWN_CALL_FORMAT")
        return CallGrammar(format_grammar(chat, template, tokenizer, prompt_ids, answer))
    syntax = _syntax(chat, form, tokenizer, prompt_ids)
    made: CallGrammar = tool_calls().tool_grammar(chat, syntax, tenant, free, answer)
    return made


def format_grammar(
    chat: Chat, template: ChatTemplate, tokenizer: ModelTokenizer, prompt_ids: tuple[int, ...], grammar: str
) -> str:
    """Return the grammar of an answer that reasons first, where the template knows how, and then keeps to a format."""
    needed = bool(grammar) or chat.thinking_token_budget is not None
    form = chat_format(chat, template, tokenizer, prompt_ids, "") if needed else None
    if form is None:
        return grammar
    syntax = _syntax(chat, form, tokenizer, prompt_ids)
    start = start_rules(syntax, required=bool(grammar))
    if start == "start: answer\n":
        return grammar
    return behind_reasoning(start, grammar) if grammar else f"{HEADER}{start}{syntax.text('answer', '')}"


def behind_open_block(mark: str, token_id: int, grammar: str) -> str:
    """Return the grammar of a format behind a reasoning block that is open, and that a token ends."""
    return behind_reasoning(start_rules(CallSyntax(None, {mark: token_id}, "", mark), required=True), grammar)


def _syntax(chat: Chat, form: ChatFormat, tokenizer: ModelTokenizer, prompt_ids: tuple[int, ...]) -> CallSyntax:
    reasoning = form.reasoning
    begins, ends = (reasoning.opens, reasoning.closes) if reasoning else ("", "")
    if form.begins_in_reasoning:
        begins = ""
    elif ends and (
        chat.continue_final_message
        or _end_of_prompt(chat, tokenizer, prompt_ids).rstrip().endswith(ends)  # the template leaves the reasoning out
        or _turned_off(chat)
    ):
        begins = ends = ""
    ids = {mark: token_id for mark in form.marks if (token_id := tokenizer.added_token(mark)) is not None}
    hides, anywhere = (reasoning.hides, reasoning.anywhere) if reasoning else ((), False)
    return CallSyntax(form.calls, ids, begins, ends, hides, anywhere, chat.thinking_token_budget)


def _turned_off(chat: Chat) -> bool:
    """Tell whether the template's variables turn reasoning off."""
    arguments = json.loads(chat.template_args or "{}")
    switches = (arguments.get("enable_thinking"), arguments.get("thinking"))
    return False in switches or arguments.get("reasoning_effort") == "none"


def _end_of_prompt(chat: Chat, tokenizer: ModelTokenizer, prompt_ids: tuple[int, ...]) -> str:
    # A message that is continued may have opened a block long ago.
    tail = prompt_ids if chat.continue_final_message else prompt_ids[-_TAIL_IDS:]
    return tokenizer.decode(tail, skip_special_tokens=False)


def _is_open(form: ReasoningFormat, end_of_prompt: str) -> bool:
    return end_of_prompt.rfind(form.opens) > end_of_prompt.rfind(form.closes)
