"""Tells an answer's reasoning and calls of tools from its text, character by character.

    <think>The user ...</think>Let me look.<tool_call>{"name": "weather", "arguments": {"city": ...}}</tool_call>
           ╰─ reasoning        ╰─ text                          ╰─ name         ╰─ arguments, as they come

A coroutine gets the characters one by one, so that what is told depends on the whole text alone, and not on the pieces
that it came in: a stream that is resumed elsewhere tells the same. A text that may be the beginning of a mark waits for
its next character. Space around calls, and line breaks behind the marks of reasoning, are not told.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from loraplex.contracts.artifacts.chat_formats import CallFormat, ReasoningFormat
from loraplex.router.request import ToolCallDelta

# The package at the edge that reads calls and has their grammars.
TOOL_CALLS = "loraplex.tool_calls"
Reading = Generator[None, str, str]
# The types of a tool's arguments in JSON Schema's words, by their names; of those that are left out any.
Types = Mapping[str, frozenset[str]]


class MarkFinder:
    """Finds the first of some marks.

    `hold_spaces`: space waits for the next other character, and is dropped before a mark. `skip_breaks`: line breaks at
    the beginning are dropped.
    """

    def __init__(self, marks: Sequence[str], *, hold_spaces: bool = False, skip_breaks: bool = False) -> None:
        self._marks = tuple(marks)
        self._hold_spaces = hold_spaces
        self._skip_breaks = skip_breaks
        self._spaces: list[str] = []
        # Beginning of a mark.
        self.partial = ""

    @property
    def mark(self) -> str:
        """Return the mark that the text ends with; empty: none."""
        return self.partial if self.partial in self._marks else ""

    @property
    def skips(self) -> bool:
        """Tell whether a line break now would be dropped."""
        return self._skip_breaks

    @property
    def spaces(self) -> str:
        """Return the space that is held back."""
        return "".join(self._spaces)

    def push(self, character: str) -> str:
        """Return the text that no mark can begin in any more. Nothing may be pushed after a mark."""
        if self._skip_breaks and character in "\r\n":
            return ""
        self._skip_breaks = False
        self.partial += character
        text: list[str] = []
        while self.partial and not any(mark.startswith(self.partial) for mark in self._marks):
            first, self.partial = self.partial[0], self.partial[1:]
            if self._hold_spaces and first.isspace():
                self._spaces.append(first)
            else:
                text += [*self._spaces, first]
                self._spaces.clear()
        return "".join(text)

    def give_up(self) -> str:
        """Return what is held back as text: a mark that does not count here."""
        held = self.rest()
        self.clear()
        return held

    def give_back(self, push_back: Callable[[str], None], text: str) -> None:
        """Let a text that was returned be read again, and what may begin a mark; hold its leading space back."""
        push_back(text.lstrip() + self.partial)
        self._spaces, self.partial = list(text[: len(text) - len(text.lstrip())]), ""

    def clear(self) -> None:
        """Forget what is held back."""
        self._spaces.clear()
        self.partial = ""

    def rest(self) -> str:
        """Return what is held back."""
        return self.spaces + self.partial


class NotACallError(Exception):
    """A text that began like a call is none."""


class NoCalls:
    """The characters of a choice whose text is never read as calls."""

    def __init__(self) -> None:
        # Number of calls that were read to their end.
        self.completed = 0
        # Characters of a call whose name is not known yet.
        self.unannounced: list[str] = []

    def take(self) -> list[ToolCallDelta]:
        """Return the parts of calls that were read since the last time, those of a call joined."""
        return []

    def read(self, read: str, *, opening: bool, marked: bool) -> Reading:
        """Read a call behind the text `read`: the first behind an opening, which has a mark, or another.

        Raises NotACallError.
        """
        raise NotImplementedError

    def one(self) -> Reading:
        """Return the next character."""
        return (yield)

    def push_back(self, text: str) -> None:
        """Let characters be read again."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How an answer writes reasoning and calls of these tools. `call_seed` makes the ids of calls unlike others'."""

    calls: CallFormat | None = None
    tools: Mapping[str, Types] = field(default_factory=dict)
    reasoning: ReasoningFormat | None = None
    # True: the prompt ends inside of a reasoning block.
    begins_in_reasoning: bool = False
    call_seed: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that must reach the reader, even where they are special tokens."""
        return tuple(mark for form in (self.reasoning, self.calls) if form is not None for mark in form.marks)


# Stands for a character of reasoning: half of a surrogate pair, which is in no stop string.
_HIDDEN = "\ud800"


@dataclass(slots=True)
class Parts:
    """The text, reasoning and calls that a piece of an answer adds."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class ChatReader:
    """Reads the answer of one choice."""

    def __init__(self, chat_format: ChatFormat, choice: int = 0) -> None:
        self._format = chat_format
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls = NoCalls()
        if chat_format.calls is not None:
            self._calls = import_module(TOOL_CALLS).CallReader(chat_format, f"{chat_format.call_seed}/{choice}")
        # The finder that holds text back, and the list that it belongs to.
        self._finder = MarkFinder(())
        self._sink = self._text
        # True if text was sent since the beginning, the last call, or the last mark that is not shown.
        self._has_text = False
        # True if the next call needs no opening of its own.
        self._in_section = False
        # Characters that hide_reasoning has not returned yet.
        self._undecided = ""
        self._machine = self._read_all()
        next(self._machine)

    @property
    def has_calls(self) -> bool:
        """Return whether a call has been read to its end."""
        return self._calls.completed > 0

    def feed(self, text: str) -> Parts:
        """Return what the next text adds."""
        for character in text:
            self._machine.send(character)
        return self._take()

    def hide_reasoning(self, text: str, *, ended: bool = False) -> str:
        """Return the next text of the answer with each character of reasoning replaced by one that no text has.

        Reasoning has its marks and the line breaks behind it. An end that may begin a block waits for the next text.
        """
        hidden: list[str] = []
        for character in text:
            self.feed(character)
            self._undecided += character
            if self._sink is self._reasoning or self._finder.skips:
                hidden.append(_HIDDEN * len(self._undecided))
                self._undecided = ""
            else:
                decided = len(self._undecided) - self._may_begin_reasoning()
                hidden.append(self._undecided[:decided])
                self._undecided = self._undecided[decided:]
        if ended:
            hidden.append(self._undecided)
            self._undecided = ""
        return "".join(hidden)

    def _may_begin_reasoning(self) -> int:
        """Return the number of the last characters that may begin a reasoning block."""
        form, partial = self._format.reasoning, self._finder.partial
        return len(partial) if form is not None and form.opens.startswith(partial) else 0

    def finish(self) -> Parts:
        """Return what is left at the end of the answer: a beginning of a mark or of a call is text after all."""
        if self._calls.unannounced:
            self._text.extend(self._calls.unannounced)
        else:
            held = self._finder.rest()
            self._sink.append(held if self._has_text or not self._calls.completed else held.strip())
        return self._take()

    def _take(self) -> Parts:
        parts = Parts("".join(self._text), "".join(self._reasoning), self._calls.take())
        self._text.clear()
        self._reasoning.clear()
        return parts

    def _read_all(self) -> Generator[None, str, None]:
        if self._format.begins_in_reasoning:
            yield from self._read_reasoning()
        while True:
            mark = yield from self._read_text()
            if self._format.reasoning is not None and mark == self._format.reasoning.opens:
                yield from self._read_reasoning()
            else:
                yield from self._read_call(mark)

    def _read_reasoning(self) -> Generator[None, str, None]:
        assert self._format.reasoning is not None
        self._finder = MarkFinder((self._format.reasoning.closes,), skip_breaks=True)
        self._sink = self._reasoning
        while not self._finder.mark:
            self._reasoning.append(self._finder.push((yield from self._calls.one())))

    def _read_text(self) -> Generator[None, str, str]:
        """Read text; return the mark that ends it, or nothing where a call may begin without one."""
        calls, reasoning = self._format.calls, self._format.reasoning
        hides = reasoning.hides if reasoning else ()
        at_begin = tuple(text[1:] for text in calls.opens if len(text) > 1 and text[0] == "^") if calls else ()
        marks = [*hides, *at_begin, *(text for text in (calls.opens if calls else ()) if text[0] != "^")]
        if reasoning and not reasoning.anywhere:
            at_begin += (reasoning.opens,)
        marks += [reasoning.opens] if reasoning else []
        ends, between = _behind_call(calls) if calls and self._calls.completed and not self._has_text else ((), ())
        marks += [*ends, *between]
        bare = calls is not None and "^" in calls.opens
        skip_breaks = self._sink is self._reasoning
        self._sink = self._text
        while True:
            self._finder = MarkFinder(marks, hold_spaces=bool(calls or hides), skip_breaks=skip_breaks)
            while not (mark := self._finder.mark):
                text = self._finder.push((yield from self._calls.one()))
                if text.strip() and not self._has_text and (bare or self._in_section):
                    self._finder.give_back(self._calls.push_back, text)
                    return ""
                self._tell(text)
            skip_breaks = mark in hides
            if self._has_text and (mark in at_begin or mark in ends or mark in between):
                self._tell(self._finder.give_up())
            elif mark in ends or mark in between:
                self._in_section = self._in_section and mark in between
            elif mark in hides:
                self._has_text = False
            else:
                return mark

    def _tell(self, text: str) -> None:
        self._text.append(text)
        self._has_text = self._has_text or bool(text.strip())

    def _read_call(self, mark: str) -> Generator[None, str, None]:
        """Read a call behind a mark, or without one."""
        assert self._format.calls is not None
        spaces = self._finder.spaces
        self._finder.clear()
        try:
            opening = bool(mark) or not self._in_section
            yield from self._calls.read(spaces + mark, opening=opening, marked=bool(mark))
        except NotACallError:
            self._text += self._calls.unannounced
            self._calls.unannounced = []
            self._has_text = True
        else:
            self._has_text, self._in_section = False, self._format.calls.shared


def _behind_call(calls: CallFormat) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts behind a call that are not shown: those that end its section, and others."""
    rest = calls.call[2].lstrip("}") if calls.arguments == "json" else ""
    between = (*rest.split(), *((*calls.calls[1].split(), ",") if calls.shared else ()))
    return (*calls.closes.split(), *calls.calls[2].split()), between
