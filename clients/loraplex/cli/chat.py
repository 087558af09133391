"""`loraplex chat`: a conversation at the terminal, or one turn for each line of a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli.options import (
    ROUTER,
    TENANT,
    AdapterOption,
    MaxTokensOption,
    ModelOption,
    RouterOption,
    TemperatureOption,
    TenantOption,
)
from loraplex.cli.service import explained, until_interrupt
from loraplex.cli.terminal import CommandError, err, out, print_error, print_warning, printable, stdin_lines

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from rich.console import RenderableType
    from rich.live import Live
    from rich.segment import Segment

    from loraplex_client import AsyncClient, AsyncGenerationStream

_HELP = """/adapter NAME  answer with this adapter; without NAME: with the base model
/system TEXT   begin anew with this system prompt; without TEXT: with none
/new           begin anew with the same system prompt
/quit          leave, as Ctrl-D does; Ctrl-C stops an answer
Pasted lines are one turn. The arrow keys go through earlier turns."""
# Maximum number of lines that a session begins with; a file with twice as many is cut to these.
_HISTORY_LINES = 1000


def chat(
    adapter: AdapterOption = "",
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", help="System prompt; default: the adapter's own, if it has one.")
    ] = "",
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    router: RouterOption = ROUTER,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends the conversation; /help lists the commands.

    [bold]loraplex chat --tenant acme --adapter support --system "You are brief."[/]
    """
    from loraplex_client import AsyncClient

    options: dict[str, Any] = {"model": model or None, "max_tokens": max_tokens, "temperature": temperature}

    async def connect() -> AsyncClient:
        return AsyncClient(router, tenant)

    with asyncio.Runner() as runner:
        client = runner.run(connect())
        conversation = Conversation(runner, client, router, options, adapter, system)
        try:
            if sys.stdin.isatty():
                conversation.talk()
            else:
                conversation.read(stdin_lines())
        finally:
            runner.run(client.close())


@dataclass
class Conversation:
    """The messages so far, and the adapter that answers.

    The calls run on an event loop, where Ctrl-C cancels a task between two steps of it. A KeyboardInterrupt within
    gRPC's blocking calls can leave their locks held or released twice, and the next turn without an answer.
    """

    runner: asyncio.Runner
    client: AsyncClient
    router: str
    options: dict[str, Any]
    adapter: str = ""
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def talk(self) -> None:
        """Ask for turns at the terminal until Ctrl-D; a failed turn is reported, and the conversation goes on.

        Raises CommandError before the first turn where the router does not answer or know the adapter.
        """
        self._use(self.adapter)
        # Ctrl-C stops an answer also where a shell started this process with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        editor = LineEditor(state_file("chat_history"))
        err().print("Ctrl-D ends, Ctrl-C stops an answer, /help lists the commands.", style="dim", markup=False)
        while True:
            try:
                text = editor.ask(f"{printable(self.adapter)}> ")
            except EOFError:
                sys.stdout.write("\n")
                return
            except KeyboardInterrupt:  # a line that was begun is dropped
                sys.stdout.write("\n")
                continue
            except UnicodeDecodeError:
                print_error("the line is not UTF-8 text")
                continue
            if text.strip() == "/quit":
                return
            try:
                self.take(text)
            except CommandError as error:
                print_error(f"{error}; /new begins anew" if _is_full(error) else str(error))
            except KeyboardInterrupt:  # before the answer began
                sys.stdout.write("\n")

    def read(self, lines: Iterator[str]) -> None:
        """Answer lines, each a turn. Raises CommandError at the first that fails."""
        for line in lines:
            if line.strip():
                self.answer(line)

    def take(self, text: str) -> None:
        """Do a command, or answer a turn. Raises CommandError."""
        command, _, rest = text.strip().partition(" ")
        match command:
            case "":
                return
            case "/help":
                out().print(_HELP, markup=False)
            case "/new":
                self.messages.clear()
            case "/system":
                self.system = rest.strip()
                self.messages.clear()
            case "/adapter":
                self._use(rest.strip())
            case _ if command.startswith("/"):
                raise CommandError(f"{command} is not a command; /help lists them")
            case _:
                self.answer(text)

    def _use(self, adapter: str) -> None:
        """Answer with an adapter from now on. Raises CommandError where the router does not answer or know it."""
        greeting = [{"role": "user", "content": "Hello"}]
        with explained("router", self.router):
            model = self.options["model"] or ""
            asked = self.client.tokenize(messages=greeting, adapter_id=adapter or None, model=model)
            self.runner.run(until_interrupt(asked))
        self.adapter = adapter

    def answer(self, text: str) -> None:
        """Print the answer to a turn; one that Ctrl-C stops is kept as far as it came. Raises CommandError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        turn = {"role": "user", "content": text}

        async def follow() -> str:
            async with self.client.chat_stream(
                [*system, *self.messages, turn], adapter_id=self.adapter or None, **self.options
            ) as stream:
                return await _follow(stream)

        with explained("router", self.router):
            self.messages += [turn, {"role": "assistant", "content": self.runner.run(until_interrupt(follow()))}]


def _is_full(error: CommandError) -> bool:
    """Tell whether a turn failed because the conversation has outgrown the model's context."""
    from loraplex_client import LoraplexError

    return isinstance(error.__cause__, LoraplexError) and error.__cause__.reason == "CONTEXT_EXCEEDED"


async def _follow(stream: AsyncGenerationStream) -> str:
    """Show the answer as it arrives, and at a terminal the reasoning before it; return its text, whole or stopped."""
    movable = out().is_terminal and not out().is_dumb_terminal
    screen, said, finished = MarkdownScreen() if movable else PlainScreen(), "", None
    try:
        async for piece in stream:
            if piece.reasoning:
                screen.reason(piece.reasoning)
            if piece.text:
                said += piece.text
                screen.write(piece.text)
            finished = piece.finished
    except asyncio.CancelledError:  # by Ctrl-C
        if not sys.stdout.isatty():
            raise
    finally:
        screen.end()
    if finished is not None and finished.finish_reason == "length" and err().is_terminal:
        err().print("The answer was cut at its limit; --max-tokens allows more.", style="dim", markup=False)
    return said


class PlainScreen:
    """Writes the text as it is; at a terminal without control characters, and after the reasoning."""

    def reason(self, text: str) -> None:
        """Show a part of the reasoning before the answer."""
        if sys.stdout.isatty():
            _print_reasoning(text)

    def write(self, text: str) -> None:
        """Show a part of the answer."""
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def end(self) -> None:
        """Show what is left, of an answer that is whole or stopped; whatever is printed next begins a new line."""
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
        """See PlainScreen."""
        self._close()
        self._reasoning = True
        _print_reasoning(text)

    def write(self, text: str) -> None:
        """See PlainScreen."""
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
        """See PlainScreen."""
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


def state_file(name: str) -> Path:
    """Return the path of a file in the user's folder for state (XDG_STATE_HOME)."""
    home = os.environ.get("XDG_STATE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state") / "loraplex" / name


class LineEditor:
    """Asks for lines, and keeps them in `history`, a file that only its owner may read.

    The file has a JSON text in each line, because a pasted line may have several lines itself.
    """

    def __init__(self, history: Path) -> None:
        self._history: Path | None = history
        self._last = ""
        self._add: Callable[[str], object] = lambda line: None
        try:
            import readline
        except ImportError:  # a Python without it reads plain lines
            return
        self._add = readline.add_history
        readline.set_auto_history(False)
        if "libedit" not in (readline.__doc__ or ""):
            # Lines that are pasted together are one line of several, which Enter ends.
            readline.parse_and_bind("set enable-bracketed-paste on")
        for line in self._read(history):
            self._add(line)
            self._last = line

    def ask(self, prompt: str) -> str:
        """Return the next line, which may have several if they were pasted. Raises EOFError, KeyboardInterrupt."""
        line = input(prompt)
        if line.strip() and line != self._last:
            self._add(line)
            self._last = line
            if self._history is not None:
                self._keep(self._history, line)
        return line

    def _read(self, history: Path) -> list[str]:
        try:
            lines = list(_texts(history))
            if len(lines) > 2 * _HISTORY_LINES:
                part = history.with_suffix(".part")
                part.touch(mode=0o600)
                part.write_text("".join(f"{json.dumps(line)}\n" for line in lines[-_HISTORY_LINES:]), encoding="utf-8")
                part.replace(history)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(error)
            return []
        return lines[-_HISTORY_LINES:]

    def _keep(self, history: Path, line: str) -> None:
        try:
            history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(
                os.open(history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        print_warning(f"the history is not kept: {error.filename}: {error.strerror}")
        self._history = None


def _texts(history: Path) -> Iterator[str]:
    """Yield the texts of a file, without lines that are no JSON text: they were written in part."""
    for line in history.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            text = json.loads(line)
        except ValueError:
            continue
        if isinstance(text, str) and "\0" not in text:
            yield text
