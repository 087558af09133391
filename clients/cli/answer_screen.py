"""The text of an answer while it arrives: Markdown rendered block by block, or the text as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Protocol

from clients.cli.terminal import out, printable

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from rich.console import RenderableType
    from rich.live import Live
    from rich.segment import Segment


class AnswerScreen(Protocol):
    """Shows an answer. Whatever is printed after `end` begins a new line."""

    def reason(self, text: str) -> None:
        """Show a part of the reasoning before the answer."""

    def write(self, text: str) -> None:
        """Show a part of the answer."""

    def end(self) -> None:
        """Show what is left, of an answer that is whole or stopped."""


def answer_screen() -> AnswerScreen:
    """Return the screen for stdout: of Markdown at a terminal that can move its cursor."""
    if out().is_terminal and not out().is_dumb_terminal:
        return MarkdownScreen()
    return PlainScreen()


class PlainScreen:
    """Writes the text as it is; at a terminal without control characters, and after the reasoning."""

    def __init__(self) -> None:
        self._at_terminal = sys.stdout.isatty()

    def reason(self, text: str) -> None:
        """See AnswerScreen."""
        if self._at_terminal:
            _print_reasoning(text)

    def write(self, text: str) -> None:
        """See AnswerScreen."""
        sys.stdout.write(printable(text) if self._at_terminal else text)
        sys.stdout.flush()

    def end(self) -> None:
        """See AnswerScreen."""
        sys.stdout.write("\n")
        sys.stdout.flush()


class MarkdownScreen:
    """Renders Markdown. Whole blocks are printed for good; the last one, which may still change, is drawn again.

    A block is a paragraph, a list, a table and so on: once another begins, nothing that follows changes it.
    """

    def __init__(self) -> None:
        self._open = ""
        self._live: Live | None = None
        self._reasoning = self._printed = False

    def reason(self, text: str) -> None:
        """See AnswerScreen."""
        self._close()
        self._reasoning = True
        _print_reasoning(text)

    def write(self, text: str) -> None:
        """See AnswerScreen."""
        if self._reasoning:
            out().print("\n")
            self._reasoning = False
        self._open += printable(text)
        if self._live is None:
            from rich.live import Live

            self._live = Live(get_renderable=self._tail, console=out(), refresh_per_second=10, transient=True)
            self._live.start()
        if "\n" in text:
            self._print(_last_block(self._open))

    def end(self) -> None:
        """See AnswerScreen."""
        self._close()
        if self._reasoning or not self._printed:
            out().print()

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(len(self._open))

    def _print(self, end: int) -> None:
        """Print the open text up to `end`, above the rest of it."""
        block, self._open = self._open[:end], self._open[end:]
        if block.strip():
            out().print(_segments(self._lines(block)), end="")
            self._printed = True

    def _tail(self) -> RenderableType:
        """Render the last lines of the open text, as many as the terminal shows."""
        return _segments(self._lines(self._open)[-max(1, out().height - 2) :])

    def _lines(self, text: str) -> list[list[Segment]]:
        """Render Markdown to lines: none that are empty at either end, and one above all but the first block."""
        from rich.markdown import Markdown

        # Without links, which show a text in place of an address.
        markdown = Markdown("", hyperlinks=False)
        markdown.parsed = _parsed(text)
        lines = out().render_lines(markdown, pad=False)
        filled = [at for at, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        shown = lines[filled[0] : filled[-1] + 1] if filled else []
        return [[], *shown] if self._printed and shown else shown


def _segments(lines: Iterable[Iterable[Segment]]) -> RenderableType:
    from rich.segment import Segment, Segments

    return Segments([segment for line in lines for segment in (*line, Segment.line())])


def _print_reasoning(text: str) -> None:
    out().print(printable(text), style="dim", end="", markup=False, soft_wrap=True)


@cache
def _parser() -> MarkdownIt:
    """Return rich's parser without what it leaves out of the text: HTML, addresses of images, definitions of links."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(["image", "reference"])


def _parsed(text: str) -> list[Token]:
    """Parse Markdown; its line breaks stay, because much of what models write is no Markdown."""
    tokens = _parser().parse(text)
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return tokens


def _last_block(text: str) -> int:
    """Return the beginning of the last block of a text's whole lines."""
    whole = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in _parser().parse(whole) if token.level == 0 and token.map is not None]
    return sum(len(line) + 1 for line in whole.split("\n")[: starts[-1]]) if starts else 0
