"""Finds what tells apart the answer to a chat: a function of the request, its template and the prompt's ids."""

from __future__ import annotations

from artifacts.chat_settings import ToolCallFormat
from broker.messages import Job
from router.output.chat_reader import ChatFormat
from router.request import Chat
from router.text.chat import ChatTemplate
from router.text.tokenizer import Text

# Number of ids at the end of the prompt among which a template opens a reasoning block.
_TAIL_IDS = 32


def chat_format(chat: Chat, template: ChatTemplate, text: Text, job: Job) -> ChatFormat | None:
    """Return the format of the answer; None where it is text alone."""
    marks = template.reasoning_marks(chat)
    tools = template.tool_format(chat) if chat.tools else ToolCallFormat.NONE
    if marks is None and tools is ToolCallFormat.NONE:
        return None
    return ChatFormat(
        tool_calls=tools,
        tool_names=frozenset(tool.name for tool in chat.tools),
        reasoning=marks,
        begins_in_reasoning=marks is not None and _is_open(marks, chat, text, job.prompt_ids),
        call_seed=job.request_id,
    )


def _is_open(marks: tuple[str, str], chat: Chat, text: Text, prompt_ids: tuple[int, ...]) -> bool:
    """Return whether the prompt ends inside of a reasoning block."""
    # A message that is continued may have opened it long ago.
    tail = prompt_ids if chat.continue_final_message else prompt_ids[-_TAIL_IDS:]
    shown = text.decode(tail, skip_special_tokens=False)
    return shown.rfind(marks[0]) > shown.rfind(marks[1])
