"""The `loraplex` command: its commands in order, and every failure as one line on stderr and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any

import typer

from loraplex.__main__ import PROCESSES, run_process
from loraplex.cli import adapters, audit, batches, models, releases
from loraplex.cli.chat import chat
from loraplex.cli.cluster import cells, drain, jobs, quarantine, queues, resume_keys, workers
from loraplex.cli.cluster_top import top
from loraplex.cli.computations import plan, quantize
from loraplex.cli.credentials import certs, keys, redis
from loraplex.cli.decide import decide
from loraplex.cli.generate import generate
from loraplex.cli.loadtest import loadtest
from loraplex.cli.options import (
    CA_VARIABLE,
    CERT_KEY_VARIABLE,
    CERT_VARIABLE,
    KEY_FILE_VARIABLE,
    ApiKeyFileOption,
    CaOption,
    CertOption,
    KeyOption,
)
from loraplex.cli.tenants import plans, tenants
from loraplex.cli.terminal import CommandError, print_error
from loraplex.cli.texts import classify, embed, rerank, score, tokens
from loraplex.cli.up import up
from loraplex.cli.usage import usage

app = typer.Typer(
    name="loraplex",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="One base language model, thousands of tenants' LoRA adapters, one cluster.\n\n"
    "[bold]loraplex up[/] starts a cluster on this machine; the other commands talk to one that runs.",
    epilog="Exit codes: 0 done; 2 bad input, or an address where nobody listens; 130 Ctrl-C; 1 anything else.",
)


def _show_version(is_set: bool) -> None:
    if is_set:
        # `git archive` has written the commit, if the package comes from a release; a checkout's file begins with "$".
        commit = files("loraplex").joinpath("commit").read_text(encoding="ascii").strip()
        typer.echo(f"loraplex {version('loraplex')}" + (f" ({commit[:12]})" if commit.isalnum() else ""))
        raise typer.Exit


@app.callback()
def credentials(
    api_key_file: ApiKeyFileOption = None,
    ca: CaOption = "",
    cert: CertOption = None,
    key: KeyOption = None,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Leave the credentials where the SDK's clients look for them."""
    values = {KEY_FILE_VARIABLE: api_key_file, CA_VARIABLE: ca, CERT_VARIABLE: cert, CERT_KEY_VARIABLE: key}
    os.environ.update({name: str(value) for name, value in values.items() if value})


def _process(context: typer.Context) -> None:
    sys.exit(run_process(str(context.info_name), context.args))


# The help page lists the commands in this order.
app.command()(up)
# Of a command that reads its own arguments, as the other processes of a cluster do.
_OWN_ARGUMENTS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    "add_help_option": False,
}
for process, (_, _, description) in PROCESSES.items():
    app.command(process, help=description, **_OWN_ARGUMENTS)(_process)
_COMMANDS: Sequence[Callable[..., None]] = (generate, chat, decide, score, rerank, tokens, embed, classify)
for command in _COMMANDS:
    app.command()(command)
for name, group in {
    **{
        "adapters": adapters.app,
        "releases": releases.app,
        "batches": batches.app,
        "models": models.app,
        "keys": keys,
        "plans": plans,
    },
    **{"tenants": tenants, "certs": certs, "redis": redis, "audit": audit.app},
}.items():
    app.add_typer(group, name=name)
app.add_typer(usage, name="usage")
_OF_CLUSTERS: Sequence[Callable[..., None]] = (top, workers, queues, jobs, drain)
for command in _OF_CLUSTERS:
    app.command()(command)
for name, group in {"cells": cells, "quarantine": quarantine, "resume-keys": resume_keys}.items():
    app.add_typer(group, name=name)
app.command(**_OWN_ARGUMENTS)(plan)
app.command()(quantize)
app.command()(loadtest)


def main() -> None:
    """Run the command that the arguments name, and exit."""
    # grpc logs errors that its calls raise as well.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    sys.exit(_run())


def _run() -> int:
    try:
        return int(app(prog_name="loraplex", standalone_mode=False) or 0)
    except CommandError as error:
        print_error(str(error))
        return error.exit_code
    except typer.TyperException as error:
        return _usage(error)
    except OSError as error:  # a file that can't be read or written
        print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _usage(error: typer.TyperException) -> int:
    """Report an unknown command or flag, or a bad value of a flag."""
    message = error.format_message().rstrip(".")
    if message:  # without arguments the help has just been shown
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else _command_path(sys.argv[1:])
        print_error(f"{message}; see `{where} --help`")
    return 2


def _command_path(arguments: Sequence[str]) -> str:
    """Return the command that the arguments begin with."""
    path: list[str] = ["loraplex"]
    command: object = typer.main.get_command(app)
    for word in arguments:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        path.append(word)
    return " ".join(path)


if __name__ == "__main__":
    main()
