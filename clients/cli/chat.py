"""`loraplex chat`: a conversation at the terminal, or one turn for each line of a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.options import ROUTER, TENANT, AdapterOption, ModelOption, RouterOption, TenantOption
from clients.cli.terminal import CommandError, err, out, print_error, printable

if TYPE_CHECKING:
    from loraplex_client import Client, GenerationStream

_PROMPT = "> "
_HELP = """/adapter NAME   answer with this adapter from now on; without NAME: with the base model
/system TEXT    begin a new conversation with this system prompt; without TEXT: with none
/new            begin a new conversation with the same system prompt
/quit           leave, as Ctrl-D does; Ctrl-C stops an answer"""


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
            conversation.read(line.rstrip("\n") for line in sys.stdin)


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
        """Ask for turns at the terminal until Ctrl-D; a failed turn is reported, and the conversation goes on."""
        # Ctrl-C stops an answer also where a shell started this process with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives the prompt its history

        err().print("Ctrl-D ends, Ctrl-C stops an answer, /help lists the commands.", style="dim", markup=False)
        while True:
            try:
                text = input(_PROMPT)
            except EOFError:
                sys.stdout.write("\n")
                return
            except KeyboardInterrupt:  # a line that was begun is dropped
                sys.stdout.write("\n")
                continue
            if text.strip() == "/quit":
                return
            try:
                self.take(text)
            except CommandError as error:
                print_error(str(error))

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
                self.adapter = rest.strip()
            case _ if command.startswith("/"):
                raise CommandError(f"{command} is no command; /help lists them")
            case _:
                self.answer(text)

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


def _follow(stream: GenerationStream) -> str:
    """Write the text as it arrives, and at a terminal the reasoning before it; return the text, whole or stopped."""
    at_terminal = sys.stdout.isatty()
    said: list[str] = []
    try:
        for piece in stream:
            if piece.reasoning and at_terminal:
                out().print(printable(piece.reasoning), style="dim", end="", markup=False, soft_wrap=True)
            if piece.text:
                said.append(piece.text)
                sys.stdout.write(printable(piece.text) if at_terminal else piece.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not at_terminal:
            raise
    finally:  # whatever is printed next, an error included, begins a new line
        sys.stdout.write("\n")
    return "".join(said)
