"""Entry point of the `loraplex` command: every failure is one line on stderr and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import typer

from clients.cli.app import app
from clients.cli.terminal import CommandError, print_error


def main() -> None:
    """Run the command that the arguments name, and exit."""
    # grpc logs errors that its calls raise as well; the variable silences its C library.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
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
    except KeyboardInterrupt:
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
