"""`loraplex redis`: the users of Redis, each with the keys and commands of its role."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clients.cli.terminal import CommandError, out

if TYPE_CHECKING:
    from broker.user_passwords import Passwords

_CELL = re.compile(r"[\w.-]+", re.ASCII)

app = typer.Typer(no_args_is_help=True, help="Make the users of Redis: router, worker, operator.")


@app.callback()
def redis() -> None:
    """Keep `acl` a command of its own."""


@app.command()
def acl(  # one parameter a flag
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the password files are; missing ones are made.")
    ],
    model: Annotated[
        list[str], typer.Option(metavar="NAME", help="Base model whose queue workers use; may be repeated.")
    ],
    cell: Annotated[str, typer.Option(metavar="NAME", help="Cell of the queues.")] = "main",
    apply: Annotated[
        bool, typer.Option("--apply", help="Set the users on the server, and load the functions of this version.")
    ] = False,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make new passwords; the present ones stay valid until the next time.")
    ] = False,
    url: Annotated[
        str,
        typer.Option(
            "--redis-url", envvar="LORAPLEX_REDIS_URL", metavar="URL", help="The server; its user may set users."
        ),
    ] = "",
) -> None:
    """Print an ACL file for the server (valkey-server --aclfile FILE), or set its users with --apply.

    The default user is turned off. Processes read their passwords from DIR/USER/password.

    [bold]loraplex redis acl ./redis-users --model Qwen2-0.5B > users.acl[/]
    """
    from artifacts.errors import ArtifactError
    from artifacts.names import check_base_name
    from broker.acl import ROLES, acl_file
    from broker.user_passwords import read_passwords, rotated, write_passwords

    try:
        models = [check_base_name(name) for name in model]
    except ArtifactError as error:
        raise CommandError(str(error)) from error
    if not _CELL.fullmatch(cell):
        raise CommandError(f"--cell {cell}: letters, digits, '-', '_' and '.'")
    if rotate and not apply:
        raise CommandError("--rotate: needs --apply, because the server must know a password before processes use it")
    if apply and not url:
        raise CommandError("--apply: name the server with --redis-url, or LORAPLEX_REDIS_URL")
    passwords = read_passwords(directory, list(ROLES))
    if rotate:
        passwords = rotated(passwords)
    if apply:
        saved = asyncio.run(_apply(url, models, cell, passwords))
    write_passwords(directory, passwords)
    if not apply:
        print("\n".join([*acl_file(models, cell, passwords), "user default off"]))
        return
    out().print(f"set the users {', '.join(ROLES)} and turned the default user off", markup=False, soft_wrap=True)
    if not saved:
        out().print("the server has no ACL file: it forgets them when it restarts", markup=False, soft_wrap=True)


async def _apply(url: str, models: list[str], cell: str, passwords: Passwords) -> bool:
    """Set the users on all nodes; return whether the server keeps them over a restart. Raises CommandError."""
    from broker.acl import set_users
    from broker.connection import REDIS_DOWN, RedisUnreachableError, connect

    try:
        async with await connect(url) as client:
            return await set_users(client, models, cell, passwords)
    except (RedisUnreachableError, *REDIS_DOWN) as error:
        raise CommandError(str(error)) from error
