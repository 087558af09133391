"""Options that several commands share. Their variables don't begin as those of the servers do: LORAPLEX_ROUTER_... and
such belong to the processes, which refuse what they don't know.
"""

from __future__ import annotations

from typing import Annotated

import typer

RouterOption = Annotated[
    str,
    typer.Option(
        "--router",
        metavar="HOST:PORT[,...]",
        envvar="LORAPLEX_ADDRESS",
        help="Where the router listens, or several routers: what one loses goes on at another.",
    ),
]
StoreOption = Annotated[
    str,
    typer.Option(
        "--store", metavar="HOST:PORT", envvar="LORAPLEX_STORE_ADDRESS", help="Where the adapter store listens."
    ),
]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", envvar="LORAPLEX_TENANT", help="Who asks.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

ROUTER = "127.0.0.1:50051"
STORE = "127.0.0.1:50052"
TENANT = "default"
