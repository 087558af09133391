"""Finds marks in a text that comes character by character, and holds back what may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


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
    def found(self) -> str:
        """Return the mark that the text ends with; empty: none."""
        return self.partial if self.partial in self._marks else ""

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
        told: list[str] = []
        while self.partial and not any(mark.startswith(self.partial) for mark in self._marks):
            first, self.partial = self.partial[0], self.partial[1:]
            if self._hold_spaces and first.isspace():
                self._spaces.append(first)
            else:
                told += [*self._spaces, first]
                self._spaces.clear()
        return "".join(told)

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
