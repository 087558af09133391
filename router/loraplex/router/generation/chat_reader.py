"""Tells an answer's reasoning and calls of tools from its text, character by character.

    <think>The user ...</think>Let me look.<tool_call>{"name": "weather", "arguments": {"city": ...}}</tool_call>
           ╰─ reasoning        ╰─ text                          ╰─ name         ╰─ arguments, as they come

A coroutine gets the characters one by one, so that what is told depends on the whole text alone, and not on the pieces
that it came in: a stream that is resumed elsewhere tells the same. A text that may be the beginning of a mark waits for
its next character. Space around calls, and line breaks behind the marks of reasoning, are not told.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import dataclass, field

from loraplex.contracts.artifacts.peft_config import ToolCallFormat
from loraplex.router.request import ToolCallDelta


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

    def clear(self) -> None:
        """Forget what is held back."""
        self._spaces.clear()
        self.partial = ""

    def rest(self) -> str:
        """Return what is held back."""
        return self.spaces + self.partial


_SPACE = frozenset(" \t\r\n")
_ARGUMENTS = ("arguments", "parameters")
# Keys that a call of Llama 3 may have beside its name and arguments: any other object is an answer in JSON.
_OTHER_KEYS = ("type", "id")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Characters and length of the ids of calls: Mistral's templates accept these alone.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9

Reading = Generator[None, str, str]


class NotACallError(Exception):
    """A text that began like a call is none; `left` is its last character, which may begin something else."""

    def __init__(self, text: str, unread: str) -> None:
        super().__init__(text)
        self.text = text
        self.unread = unread


class _BrokenError(Exception):
    """The next character can't come there in a call."""


class CallReader:
    """Reads the calls of one choice, in the formats of the families; `seed` makes their ids.

    Hermes, Qwen   <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    Llama 3        {"name": "f", "parameters": {"x": 1}}                    also behind <|python_tag|>; several with `;`
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]        or [TOOL_CALLS]f[ARGS]{"x": 1}

    A call is announced when its name is known; what turns out before that to be no call is text.
    """

    def __init__(self, seed: str) -> None:
        self._seed = seed
        # Parts since the last `take`: index, id and name of a call, and pieces of its arguments.
        self._parts: list[tuple[int, str, str, list[str]]] = []
        self._announced = 0
        # Number of calls that were read to their end.
        self.completed = 0
        # Characters of a call whose name is not known yet.
        self.unannounced: list[str] = []
        self._keeping = False
        # Arguments of the current call that came before its name, and whether it has had any.
        self._early: list[str] = []
        self._has_arguments = False

    def take(self) -> list[ToolCallDelta]:
        """Return the parts that were read since the last time, those of a call joined."""
        taken = [ToolCallDelta(index, call_id, name, "".join(pieces)) for index, call_id, name, pieces in self._parts]
        self._parts.clear()
        return taken

    def read(self, tool_format: ToolCallFormat, mark: str, names: Container[str], spaces: str) -> Reading:
        """Read the calls behind spaces and a mark; return the character behind them, or nothing.

        Raises NotACallError.
        """
        self._begin(spaces + mark)
        try:
            if tool_format is ToolCallFormat.MISTRAL:
                return (yield from self._read_mistral())
            if tool_format is ToolCallFormat.LLAMA3:
                return (yield from self._read_llama(mark, names))
            yield from self._read_object((yield from self._next_character()), None)
            return ""
        except _BrokenError as error:
            unread = str(error)
            if not self._keeping:  # the call is announced: what follows is text
                return unread
            text, self.unannounced, self._keeping = "".join(self.unannounced[:-1]), [], False
            raise NotACallError(text, unread) from None

    def _read_llama(self, mark: str, names: Container[str]) -> Reading:
        character = mark if mark == "{" else (yield from self._next_character())
        while True:
            yield from self._read_object(character, names if mark == "{" else None)
            character = yield from self._next_character()
            while character in ";,":
                character = yield from self._next_character()
            if character != "{":
                return character
            self._begin(character)

    def _read_mistral(self) -> Reading:
        character = yield from self._next_character()
        if character != "[":
            return (yield from self._read_named(character))
        while True:
            yield from self._read_object((yield from self._next_character()), None)
            character = yield from self._next_character()
            if character != ",":
                return "" if character == "]" else character
            self._begin("")

    def _read_named(self, character: str) -> Reading:
        """Read a call whose name comes before its arguments."""
        name: list[str] = []
        while character not in "[{":
            name.append(character)
            if len(name) > 128:
                raise _BrokenError(character)
            character = yield from self._one()
        while character == "[":  # [CALL_ID]...[ARGS]
            inner = yield from self._until("]")
            character = yield from self._next_character()
            if inner == "CALL_ID":
                yield from self._until("[")
                character = "["
            elif inner != "ARGS":
                raise _BrokenError(character)
        if character != "{" or not _NAME.fullmatch("".join(name).strip()):
            raise _BrokenError(character)
        self._announce("".join(name).strip())
        unread = yield from self._read_value(character, self._tell_arguments)
        self.completed += 1
        return unread

    def _read_object(self, character: str, names: Container[str] | None) -> Reading:
        """Read a call that is an object; with `names` it has one of these. Returns nothing."""
        if character != "{":
            raise _BrokenError(character)
        character = yield from self._next_character()
        while character != "}":
            if character != '"':
                raise _BrokenError(character)
            key = yield from self._read_string()
            if (colon := (yield from self._next_character())) != ":":
                raise _BrokenError(colon)
            character = yield from self._next_character()
            character = yield from self._read_field(key, character, names)
            character = character or (yield from self._next_character())
            if character == ",":
                character = yield from self._next_character()
            elif character != "}":
                raise _BrokenError(character)
        if self._keeping:
            raise _BrokenError(character)
        if not self._has_arguments:
            self._tell_arguments("{}")
        self.completed += 1
        return ""

    def _read_field(self, key: str, character: str, names: Container[str] | None) -> Reading:
        if key == "name" and self._keeping:
            if character != '"':
                raise _BrokenError(character)
            name = yield from self._read_string()
            if names is not None and name not in names:
                raise _BrokenError('"')
            self._announce(name)
            return ""
        if key in _ARGUMENTS and not self._has_arguments:
            return (yield from self._read_value(character, self._tell_arguments))
        if names is not None and key not in _OTHER_KEYS:
            raise _BrokenError(character)
        return (yield from self._read_value(character, lambda _: None))

    def _read_value(self, character: str, tell: Callable[[str], None]) -> Reading:
        """Read a JSON value by its brackets and quotes; return the character behind a number, else nothing."""
        depth, in_string, escaped = 0, False, False
        while True:
            if not in_string and not depth and character in ",}":
                return character
            tell(character)
            if in_string:
                in_string = escaped or character != '"'
                escaped = not escaped and character == "\\"
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            if not depth and not in_string and character in '"}]':
                return ""
            character = yield from self._one()

    def _read_string(self) -> Reading:
        """Read a string behind its first quote; return it without quotes and escapes."""
        characters: list[str] = []
        escaped = False
        while (character := (yield from self._one())) != '"' or escaped:
            characters.append(character)
            escaped = not escaped and character == "\\"
        try:
            return str(json.loads(f'"{"".join(characters)}"', strict=False))
        except ValueError:
            raise _BrokenError(character) from None

    def _until(self, end: str) -> Reading:
        characters: list[str] = []
        while (character := (yield from self._one())) != end:
            characters.append(character)
        return "".join(characters)

    def _next_character(self) -> Reading:
        """Return the next character that is not space."""
        while (character := (yield from self._one())) in _SPACE:
            pass
        return character

    def _one(self) -> Reading:
        character = yield
        if self._keeping:
            self.unannounced.append(character)
        return character

    def _begin(self, read: str) -> None:
        """Begin a call, of which `read` is read already."""
        self.unannounced, self._keeping = [read], True
        self._early, self._has_arguments = [], False

    def _announce(self, name: str) -> None:
        self.unannounced, self._keeping = [], False
        digest = hashlib.sha256(f"{self._seed}/{self._announced}".encode()).digest()
        call_id = "".join(_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in digest[:_ID_LENGTH])
        self._parts.append((self._announced, call_id, name, self._early))
        self._announced += 1
        self._early = []

    def _tell_arguments(self, text: str) -> None:
        self._has_arguments = True
        if self._keeping:
            self._early.append(text)
        elif self._parts:  # of the call announced last
            self._parts[-1][3].append(text)
        else:
            self._parts.append((self._announced - 1, "", "", [text]))


# Texts that begin a call, by format; and the text that ends one of Hermes'.
_BEGINNINGS = {
    ToolCallFormat.HERMES: "<tool_call>",
    ToolCallFormat.LLAMA3: "<|python_tag|>",
    ToolCallFormat.MISTRAL: "[TOOL_CALLS]",
}
_HERMES_END = "</tool_call>"
# Further texts of a format that may be tokens which are not shown otherwise.
_INNER = {ToolCallFormat.HERMES: (_HERMES_END,), ToolCallFormat.MISTRAL: ("[ARGS]", "[CALL_ID]")}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The marks of an answer: around reasoning, and of calls. `call_seed` makes the ids of calls unlike others'."""

    tool_calls: ToolCallFormat = ToolCallFormat.NONE
    tool_names: frozenset[str] = frozenset()
    reasoning: tuple[str, str] | None = None
    # True: the prompt ends inside of a reasoning block.
    begins_in_reasoning: bool = False
    call_seed: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that must reach the reader, even where they are special tokens."""
        beginning = _BEGINNINGS.get(self.tool_calls)
        return (*(self.reasoning or ()), *([beginning] if beginning else ()), *_INNER.get(self.tool_calls, ()))


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
        self._calls = CallReader(f"{chat_format.call_seed}/{choice}")
        # The finder that holds text back, and the list that it belongs to.
        self._finder = MarkFinder(())
        self._sink = self._text
        # True if text was sent since the beginning, or since the last call.
        self._has_text = False
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
        marks, partial = self._format.reasoning, self._finder.partial
        return len(partial) if marks is not None and marks[0].startswith(partial) else 0

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
        unread = ""
        if self._format.begins_in_reasoning:
            yield from self._read_reasoning()
        while True:
            mark = yield from self._read_text(unread)
            unread = ""
            if self._format.reasoning is not None and mark == self._format.reasoning[0]:
                yield from self._read_reasoning()
            else:
                unread = yield from self._read_calls(mark)

    def _read_reasoning(self) -> Generator[None, str, None]:
        assert self._format.reasoning is not None
        self._finder, self._sink = MarkFinder((self._format.reasoning[1],), skip_breaks=True), self._reasoning
        while not self._finder.mark:
            self._reasoning.append(self._finder.push((yield)))

    def _read_text(self, unread: str) -> Generator[None, str, str]:
        """Read text, beginning with a character that is left; return the mark that ends it."""
        after_reasoning = self._sink is self._reasoning
        tools = self._format.tool_calls
        marks = [_BEGINNINGS[tools]] if tools in _BEGINNINGS else []
        if tools is ToolCallFormat.HERMES and self._calls.completed and not self._has_text:
            marks.append(_HERMES_END)
        if self._format.reasoning is not None:
            marks.append(self._format.reasoning[0])
        self._finder = MarkFinder(marks, hold_spaces=bool(tools in _BEGINNINGS), skip_breaks=after_reasoning)
        self._sink = self._text
        while True:
            character = unread or (yield)
            unread = ""
            if character == "{" and tools is ToolCallFormat.LLAMA3 and not (self._has_text or self._finder.partial):
                return character
            self._tell(self._finder.push(character))
            mark = self._finder.mark
            if mark == _HERMES_END and not self._has_text:
                self._finder.clear()
            elif mark == _HERMES_END:
                self._tell(self._finder.give_up())
            elif self._format.reasoning is not None and mark == self._format.reasoning[0] and self._has_text:
                self._tell(self._finder.give_up())  # a block stands at the beginning alone
            elif mark:
                return mark

    def _tell(self, text: str) -> None:
        self._text.append(text)
        self._has_text = self._has_text or bool(text.strip())

    def _read_calls(self, mark: str) -> Generator[None, str, str]:
        """Read one or more calls behind a mark; return the character that belongs to them no more."""
        spaces = self._finder.spaces
        self._finder.clear()
        try:
            unread = yield from self._calls.read(self._format.tool_calls, mark, self._format.tool_names, spaces)
        except NotACallError as error:
            self._text.append(error.text)
            self._has_text = True
            return error.unread
        self._has_text = False
        return unread
