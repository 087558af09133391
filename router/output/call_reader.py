"""Reads the calls of tools that a model writes, character by character, in the formats of the families.

Hermes, Qwen   <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
Llama 3        {"name": "f", "parameters": {"x": 1}}                     also behind <|python_tag|>; several with `;`
Mistral        [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]        or [TOOL_CALLS]f[ARGS]{"x": 1}

A call is announced when its name is known; what turns out before that to be no call is text.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Container, Generator

from artifacts.chat_settings import ToolCallFormat
from router.request import ToolCallDelta

_SPACE = frozenset(" \t\r\n")
_ARGUMENTS = ("arguments", "parameters")
# Keys that a call of Llama 3 may have beside its name and arguments: any other object is an answer in JSON.
_OTHER_KEYS = ("type", "id")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Characters and length of the ids of calls: Mistral's templates accept these alone.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9

Reading = Generator[None, str, str]


class NotACallError(Exception):
    """A text that began like a call is none; `left` is its last character, which may begin something else."""

    def __init__(self, text: str, left: str) -> None:
        super().__init__(text)
        self.text = text
        self.left = left


class _BrokenError(Exception):
    """The next character can't come there in a call."""


class CallReader:
    """Reads the calls of one choice; `seed` makes their ids."""

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
            left = str(error)
            if not self._keeping:  # the call is announced: what follows is text
                return left
            text, self.unannounced, self._keeping = "".join(self.unannounced[:-1]), [], False
            raise NotACallError(text, left) from None

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
            if len(name) > 64:
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
        left = yield from self._read_value(character, self._tell_arguments)
        self.completed += 1
        return left

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
