"""Reads calls of tools out of an answer's text, character by character, in any format that is declared."""

from __future__ import annotations

import hashlib
import itertools
import json
import string
from collections.abc import Callable, Sequence

from loraplex.contracts.artifacts.chat_formats import MARK
from loraplex.router.generation.chat_reader import ChatFormat, MarkFinder, NoCalls, NotACallError, Reading
from loraplex.router.request import ToolCallDelta
from loraplex.tool_calls.values import is_unicode, json_of, typed

_SPACE = frozenset(" \t\r\n")
# Keys that a call without a mark may have beside its name and arguments: any other object is an answer in JSON.
_OTHER_KEYS = ("type", "id")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_.-")
_NAME_LENGTH = 128
# Maximum number of characters between a name and the mark in front of its arguments.
_SKIPPED = 64
# Characters and length of the ids of calls: Mistral's templates accept these alone.
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9


class _BrokenError(Exception):
    """The next characters can't come there in a call; they are to be read again."""


def _follow(character: str, ends: list[str]) -> None:
    """Note what closes the brackets that are open, the last one last. Raises _BrokenError for what closes another."""
    if character in _CLOSING:
        ends.append(_CLOSING[character])
    elif character in _CLOSING.values() and (not ends or ends.pop() != character):
        raise _BrokenError(character)


class CallReader(NoCalls):
    """Reads the calls of one choice in a format; `seed` makes their ids.

    A call is announced when its name is known; what turns out before that to be no call is text. What is told of its
    arguments is a JSON object, whatever the format writes.
    """

    def __init__(self, chat_format: ChatFormat, seed: str) -> None:
        super().__init__()
        assert chat_format.calls is not None
        self._form = chat_format.calls
        self._tools = chat_format.tools
        self._seed = seed
        # Parts since the last `take`: index, id and name of a call, and pieces of its arguments.
        self._parts: list[tuple[int, str, str, list[str]]] = []
        self._announced = 0
        # Whether the name of the call is not known yet.
        self._keeping = False
        # Characters that are to be read again, the last first.
        self._again: list[str] = []
        # Whether calls need the name of a tool, since no mark is in front of them.
        self._restricted = False
        # Arguments of the current call that came before its name, and whether it has had any.
        self._early: list[str] = []
        self._has_arguments = False
        # Text in front of the mark that was found last.
        self._passed = ""

    def take(self) -> list[ToolCallDelta]:
        """See NoCalls."""
        taken = [ToolCallDelta(index, call_id, name, "".join(pieces)) for index, call_id, name, pieces in self._parts]
        self._parts.clear()
        return taken

    def read(self, read: str, *, opening: bool, marked: bool) -> Reading:
        """See NoCalls."""
        self.unannounced, self._keeping, self._early, self._has_arguments = [read], True, [], False
        self._restricted = self._restricted if not opening else not marked
        try:
            if opening and (bracket := self._form.calls[0].strip()):
                yield from self._expect(bracket, optional=marked)
            yield from (self._read_object() if self._form.keys else self._read_named())
        except _BrokenError as error:
            self.push_back(str(error))
            if self._keeping:
                self._keeping = False
                raise NotACallError from None
        return ""

    def one(self) -> Reading:
        """See NoCalls."""
        character = self._again.pop() if self._again else (yield)
        if self._keeping:
            self.unannounced.append(character)
        return character

    def push_back(self, text: str) -> None:
        """See NoCalls."""
        self._again += reversed(text)
        if self._keeping and text:
            del self.unannounced[-len(text) :]

    def _read_object(self) -> Reading:
        """Read a call that is a JSON object."""
        yield from self._expect(self._form.call[0].partition("{")[0] + "{")
        character = yield from self._next_character()
        while character != "}":
            if character != '"':
                raise _BrokenError(character)
            key = yield from self._read_string()
            yield from self._expect(":")
            yield from self._read_field(key, (yield from self._next_character()))
            character = yield from self._next_character()
            if character == ",":
                character = yield from self._next_character()
            elif character != "}":
                raise _BrokenError(character)
        if self._keeping:
            raise _BrokenError(character)
        self._complete("" if self._has_arguments else "{}")
        return ""

    def _read_field(self, key: str, character: str) -> Reading:
        assert self._form.keys is not None
        names, arguments = self._form.keys
        if key in names and self._keeping:
            if character != '"':
                raise _BrokenError(character)
            name = yield from self._read_string()
            self._check_name(name, '"')
            self._announce(name)
        elif key in arguments and not self._has_arguments:
            yield from self._read_value(character, self._tell_arguments)
        elif self._restricted and key not in _OTHER_KEYS:
            raise _BrokenError(character)
        else:
            yield from self._read_value(character, lambda _: None)
        return ""

    def _read_named(self) -> Reading:
        """Read a call whose name stands before its arguments."""
        before, middle, _ = self._form.call
        yield from self._expect(before)
        letters: list[str] = []
        character = yield from self._next_character()
        while character in _NAME_CHARACTERS and len(letters) < _NAME_LENGTH:
            letters.append(character)
            character = yield from self.one()
        self.push_back(character)
        name = "".join(letters)
        self._check_name(name, "")
        for mark in (MARK.findall(middle) or middle.split())[-1:]:
            yield from self._up_to((mark,), _SKIPPED)
        if self._form.arguments == "text":
            yield from self._read_texts(name)
        elif self._form.arguments == "literal":
            yield from self._read_literals(name)
        else:
            yield from self._expect("{")
            self._announce(name)
            yield from self._read_value("{", self._tell_arguments)
            self._complete("")
        return ""

    def _check_name(self, name: str, unread: str) -> None:
        if not name or not is_unicode(name) or (self._restricted and name not in self._tools):
            raise _BrokenError(unread)

    def _read_texts(self, name: str) -> Reading:
        """Read arguments whose values stand between texts: strings as they are, others as JSON."""
        before, between, behind, _ = (text.strip() for text in self._form.argument)
        ends = tuple(text for text in (self._form.call[2].strip(), self._form.closes) if text)
        for number in itertools.count():
            mark = yield from self._up_to((before, *ends), 0)
            self._announce_once(name)
            if mark != before:
                self._complete("}")
                return ""
            first, *others = between.split()
            yield from self._up_to((first,), _NAME_LENGTH)
            key = self._passed.strip()
            for word in others:
                yield from self._expect(word)
            self._tell_arguments(f"{', ' if number else ''}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._read_text(behind, self._tools.get(name, {}).get(key, frozenset()))
        raise AssertionError

    def _read_text(self, behind: str, types: frozenset[str]) -> Reading:
        """Read a value up to the text behind it; line breaks that the format writes around it are left out."""
        if self._form.argument[1].endswith("\n") and (character := (yield from self.one())) != "\n":
            self.push_back(character)
        broken = (f"\n{behind}",) if self._form.argument[2].startswith("\n") else ()
        if types != {"string"}:
            yield from self._up_to((behind, *broken), None)
            self._tell_arguments(typed(self._passed, types))
            return ""
        finder = MarkFinder((behind, *broken))
        self._tell_arguments('"')
        while not finder.mark:
            text = finder.push((yield from self.one()))
            self._tell_arguments(text if text.isalnum() else json.dumps(text, ensure_ascii=False)[1:-1])
        self._tell_arguments('"')
        return ""

    def _read_literals(self, name: str) -> Reading:
        """Read arguments as Python, or a notation like it, writes them: a key, a mark, and a literal."""
        between, end = self._form.argument[1].strip(), self._form.call[2].strip()[0]
        for number in itertools.count():
            character = yield from self._next_character()
            if character == "," and number:
                character = yield from self._next_character()
            if character == end:
                self._announce_once(name)
                self._complete("}")
                return ""
            letters: list[str] = []
            while character.isalnum() or character in "_-":
                letters.append(character)
                character = yield from self.one()
            self.push_back(character)
            if not letters:
                raise _BrokenError("")
            yield from self._expect(between)
            self._announce_once(name)
            self._tell_arguments(f"{', ' if number else ''}{json.dumps(''.join(letters), ensure_ascii=False)}: ")
            self._tell_arguments(json_of((yield from self._read_literal(end)), self._form.quote))
        raise AssertionError

    def _read_literal(self, end: str) -> Reading:
        """Return a literal up to the comma behind it, or the end of the arguments."""
        quotes = (self._form.quote,) if self._form.quote else ('"', "'")
        text, quote, ends, escaped = "", "", list[str](), False
        while True:
            character = yield from self.one()
            if not quote and not ends and character in (",", end):
                self.push_back(character)
                return text.strip()
            text += character
            if quote:
                quote = "" if text.endswith(quote) and not escaped else quote
                escaped = not escaped and character == "\\" and not self._form.quote
            elif not (quote := next((one for one in quotes if text.endswith(one)), "")):
                _follow(character, ends)

    def _read_value(self, character: str, tell: Callable[[str], None]) -> Reading:
        """Read a JSON value by its brackets and quotes; the character behind a number is read again."""
        ends, in_string, escaped = list[str](), False, False
        while True:
            if not in_string and not ends and character in ",}":
                self.push_back(character)
                return ""
            if not in_string:
                _follow(character, ends)
            tell(character)
            if in_string:
                in_string = escaped or character != '"'
                escaped = not escaped and character == "\\"
            elif character == '"':
                in_string = True
            if not ends and not in_string and character in '"}]':
                return ""
            character = yield from self.one()

    def _read_string(self) -> Reading:
        """Read a string behind its first quote; return it without quotes and escapes."""
        characters: list[str] = []
        escaped = False
        while (character := (yield from self.one())) != '"' or escaped:
            characters.append(character)
            escaped = not escaped and character == "\\"
        try:
            return str(json.loads(f'"{"".join(characters)}"', strict=False))
        except ValueError:
            raise _BrokenError(character) from None

    def _up_to(self, marks: Sequence[str], most: int | None) -> Reading:
        """Return the mark that comes next; `_passed` is the text in front, of `most` characters beside space."""
        finder, passed = MarkFinder(marks, hold_spaces=most == 0), ""
        while not finder.mark:
            passed += finder.push((yield from self.one()))
            if most is not None and len(passed) > most:
                raise _BrokenError(passed + finder.partial)
        self._passed = passed
        return finder.mark

    def _expect(self, text: str, *, optional: bool = False) -> Reading:
        """Read a text, with any space before its words; an optional one may be missing."""
        for word in text.split():
            read = yield from self._next_character()
            while word.startswith(read) and word != read:
                read += yield from self.one()
            if word != read:
                if not optional or len(read) > 1:
                    raise _BrokenError(read)
                self.push_back(read)
                return ""
        return ""

    def _next_character(self) -> Reading:
        """Return the next character that is not space."""
        while (character := (yield from self.one())) in _SPACE:
            pass
        return character

    def _announce_once(self, name: str) -> None:
        if self._keeping:
            self._announce(name)
            self._tell_arguments("{")

    def _announce(self, name: str) -> None:
        self.unannounced, self._keeping = [], False
        digest = hashlib.sha256(f"{self._seed}/{self._announced}".encode()).digest()
        call_id = "".join(_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in digest[:_ID_LENGTH])
        self._parts.append((self._announced, call_id, name, self._early))
        self._announced += 1
        self._early = []

    def _complete(self, rest: str) -> None:
        if rest:
            self._tell_arguments(rest)
        self.completed += 1

    def _tell_arguments(self, text: str) -> None:
        self._has_arguments = True
        if self._keeping:
            self._early.append(text)
        elif self._parts:  # of the call announced last
            self._parts[-1][3].append(text)
        else:
            self._parts.append((self._announced - 1, "", "", [text]))
