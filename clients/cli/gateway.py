"""`loraplex gateway`: serves HTTP in front of routers."""

from __future__ import annotations

import sys

import typer


def gateway(context: typer.Context) -> None:
    """Serve the HTTP protocols of OpenAI, Anthropic, and LoRAX and TGI, as a client of routers, until Ctrl-C."""
    from clients.gateway.__main__ import main

    sys.exit(main(context.args, "loraplex gateway"))
