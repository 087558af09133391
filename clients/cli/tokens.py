"""`loraplex tokens`: the tokens of a text, counted or listed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from clients.cli.options import ROUTER, TENANT, AdapterOption, JsonOption, ModelOption, RouterOption, TenantOption
from clients.cli.terminal import print_json, read_stdin


def tokens(
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The text; default: all of stdin.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="TEXT is a user's message, which the chat template makes a prompt.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print the tokens' ids instead of their number.")] = False,
    adapter: AdapterOption = "",
    tenant: TenantOption = TENANT,
    model: ModelOption = "",
    router: RouterOption = ROUTER,
    as_json: JsonOption = False,
) -> None:
    """Print how many tokens a prompt has, as generating from it would count them.

    An adapter matters to --chat alone, where it has a chat template or a system prompt of its own.

    [bold]loraplex tokens "Dear customer,"[/]
    [bold]loraplex tokens --ids < letter.txt[/]
    """
    from loraplex_client import Client

    from clients.cli.failures import explained

    given = read_stdin() if text is None else text
    with explained("router", router), Client(router, tenant) as client:
        found = client.tokenize(
            None if chat else given,
            messages=[{"role": "user", "content": given}] if chat else None,
            model=model,
            adapter_id=adapter or None,
        )
    if as_json:
        print_json({"tokens": len(found), "token_ids": found})
    else:
        sys.stdout.write(f"{' '.join(map(str, found)) if ids else len(found)}\n")
