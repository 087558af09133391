"""Options that several commands share.

Their variables avoid the prefixes of the servers' (LORAPLEX_ROUTER_...), because servers refuse unknown variables.
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
        help="Address of the router. With several, a stream that loses its router continues at another.",
    ),
]
StoreOption = Annotated[
    str,
    typer.Option("--store", metavar="HOST:PORT", envvar="LORAPLEX_STORE_ADDRESS", help="Address of the adapter store."),
]
TenantOption = Annotated[
    str, typer.Option("--tenant", metavar="NAME", envvar="LORAPLEX_TENANT", help="Tenant that the requests are for.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

ROUTER = "127.0.0.1:50051"
STORE = "127.0.0.1:50052"
TENANT = "default"
