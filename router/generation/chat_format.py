"""Finds what tells apart the answer to a chat, and the grammar that its calls of tools keep to.

Both are functions of the request, its chat template and the prompt's ids: a router that resumes the request finds the
same.
"""

from __future__ import annotations

from artifacts.chat_settings import ToolCallFormat
from router.generation.tool_grammar import CallSyntax, tool_grammar
from router.output.chat_reader import ChatFormat
from router.request import Chat, ToolMode
from router.text.chat import ChatTemplate
from router.text.text import Text
from rpc.errors import InvalidField

# Number of ids at the end of the prompt among which a template opens or closes a reasoning block.
_TAIL_IDS = 32


def chat_format(
    chat: Chat, template: ChatTemplate, text: Text, prompt_ids: tuple[int, ...], call_seed: str
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
        begins_in_reasoning=marks is not None and _is_open(marks, _end_of_prompt(chat, text, prompt_ids)),
        call_seed=call_seed,
    )


def call_grammar(chat: Chat, template: ChatTemplate, text: Text, prompt_ids: tuple[int, ...], tenant: str = "") -> str:
    """Return the grammar of the answer to a chat with tools; empty: none is needed. Raises InvalidField."""
    found = chat_format(chat, template, text, prompt_ids, "")
    if not chat.tools:
        return ""
    if found is None or found.tool_calls is ToolCallFormat.NONE:
        if chat.tool_mode is ToolMode.REQUIRED:
            message = "the chat template shows no format of calls that is known; name it in loraplex_chat.tool_calls"
            raise InvalidField("chat.tool_choice", message, reason="UNKNOWN_CALL_FORMAT")
        return ""
    begins = ends = ""
    if found.reasoning is not None:
        end = _end_of_prompt(chat, text, prompt_ids)
        closed = end.rstrip().endswith(found.reasoning[1])  # the template leaves the reasoning out
        begins = "" if found.begins_in_reasoning else found.reasoning[0]
        ends = "" if closed else found.reasoning[1]
    ids = {mark: token_id for mark in found.marks if (token_id := text.special_token(mark)) is not None}
    named_first = "[ARGS]" in template.source_for(chat)
    return tool_grammar(chat, CallSyntax(found.tool_calls, ids, named_first, begins, ends), tenant)


def _end_of_prompt(chat: Chat, text: Text, prompt_ids: tuple[int, ...]) -> str:
    # A message that is continued may have opened a block long ago.
    tail = prompt_ids if chat.continue_final_message else prompt_ids[-_TAIL_IDS:]
    return text.decode(tail, skip_special_tokens=False)


def _is_open(marks: tuple[str, str], end_of_prompt: str) -> bool:
    return end_of_prompt.rfind(marks[0]) > end_of_prompt.rfind(marks[1])
