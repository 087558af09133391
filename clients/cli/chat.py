"""`loraplex chat`: a conversation at the terminal, or one turn for each line of a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.answer_screen import answer_screen
from clients.cli.line_editor import LineEditor, state_file
from clients.cli.options import ROUTER, TENANT, AdapterOption, ModelOption, RouterOption, TenantOption
from clients.cli.terminal import CommandError, err, out, print_error, printable, stdin_lines

if TYPE_CHECKING:
    from loraplex_client import Client, GenerationStream

_HELP = """/adapter NAME  answer with this adapter; without NAME: with the base model
/system TEXT   begin anew with this system prompt; without TEXT: with none
/new           begin anew with the same system prompt
/quit          leave, as Ctrl-D does; Ctrl-C stops an answer
Pasted lines are one turn. The arrow keys go through earlier turns."""


def chat(
    adapter: AdapterOption = "",
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", help="System prompt; default: the adapter's own, if it has one.")
    ] = "",
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of tokens of an answer; 128 by default.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="Sampling temperature; 0, the default, is greedy.")
    ] = None,
    router: RouterOption = ROUTER,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends the conversation; /help lists the commands.

    [bold]loraplex chat --tenant acme --adapter support --system "You are brief."[/]
    """
    from loraplex_client import Client

    options: dict[str, Any] = {"model": model or None, "max_tokens": max_tokens, "temperature": temperature}
    with Client(router, tenant) as client:
        conversation = Conversation(client, router, options, adapter, system)
        if sys.stdin.isatty():
            conversation.talk()
        else:
            conversation.read(stdin_lines())


@dataclass
class Conversation:
    """The messages so far, and the adapter that answers."""

    client: Client
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
                raise CommandError(f"{command} is no command; /help lists them")
            case _:
                self.answer(text)

    def _use(self, adapter: str) -> None:
        """Answer with an adapter from now on. Raises CommandError where the router does not answer or know it."""
        from clients.cli.failures import explained

        greeting = [{"role": "user", "content": "Hello"}]
        with explained("router", self.router):
            self.client.tokenize(messages=greeting, adapter_id=adapter or None, model=self.options["model"] or "")
        self.adapter = adapter

    def answer(self, text: str) -> None:
        """Print the answer to a turn; one that Ctrl-C stops is kept as far as it came. Raises CommandError."""
        from clients.cli.failures import explained

        system = [{"role": "system", "content": self.system}] if self.system else []
        turn = {"role": "user", "content": text}
        with (
            explained("router", self.router),
            self.client.chat_stream(
                [*system, *self.messages, turn], adapter_id=self.adapter or None, **self.options
            ) as stream,
        ):
            self.messages += [turn, {"role": "assistant", "content": _follow(stream)}]


def _is_full(error: CommandError) -> bool:
    """Tell whether a turn failed because the conversation has outgrown the model's context."""
    from loraplex_client import LoraplexError

    return isinstance(error.__cause__, LoraplexError) and error.__cause__.reason == "CONTEXT_EXCEEDED"


def _follow(stream: GenerationStream) -> str:
    """Show the answer as it arrives, and at a terminal the reasoning before it; return its text, whole or stopped."""
    screen, said, finished = answer_screen(), "", None
    try:
        for piece in stream:
            if piece.reasoning:
                screen.reason(piece.reasoning)
            if piece.text:
                said += piece.text
                screen.write(piece.text)
            finished = piece.finished
    except KeyboardInterrupt:
        if not sys.stdout.isatty():
            raise
    finally:
        screen.end()
    if finished is not None and finished.finish_reason == "length" and err().is_terminal:
        err().print("The answer was cut at its limit; --max-tokens allows more.", style="dim", markup=False)
    return said
