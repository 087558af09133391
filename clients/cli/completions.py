"""Words for the shell's completion that a running cluster knows: adapters, base models, workers.

A cluster that does not answer at once has none, and says nothing: whatever is printed would appear in the line that is
typed. Credentials are the environment's.
"""

from __future__ import annotations

import os
from contextlib import suppress

import typer

from clients.cli.service import cluster_service
from clients.cli.terminal import CommandError

# Timeout in seconds of the call; the shell waits for it.
_ASK_S = 1.0


def adapter_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the adapters that the tenant may use, and those with an alias, as a request names them."""
    from loraplex_client import LoraplexError, StoreClient

    from clients.cli.options import STORE

    address = _given(context, "store", "LORAPLEX_STORE_ADDRESS", STORE)
    names = set()
    with suppress(LoraplexError), StoreClient(address, _tenant(context), timeout_s=_ASK_S) as store:
        for adapter in store.list():
            name = adapter.name.rpartition("/")[2]
            names |= {name if alias == "live" else f"{name}@{alias}" for alias in adapter.aliases}
    return sorted(name for name in names if name.startswith(incomplete))


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the base models that the router serves."""
    from loraplex_client import Client, LoraplexError

    with suppress(LoraplexError), Client(_router(context), _tenant(context), timeout_s=_ASK_S) as client:
        return [model.name for model in client.models() if model.name.startswith(incomplete)]
    return []


def worker_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Return the live workers of the router."""
    from loraplex.cluster.v1 import cluster_pb2

    with suppress(CommandError):
        service = cluster_service(_router(context), _tenant(context), _ASK_S)
        workers = service.ask("ListWorkers", cluster_pb2.ListWorkersRequest()).workers
        return [worker.worker_id for worker in workers if worker.worker_id.startswith(incomplete)]
    return []


def _router(context: typer.Context) -> str:
    from clients.cli.options import ROUTER

    return _given(context, "router", "LORAPLEX_ADDRESS", ROUTER)


def _tenant(context: typer.Context) -> str:
    return _given(context, "tenant", "LORAPLEX_TENANT", "")


def _given(context: typer.Context, flag: str, variable: str, default: str) -> str:
    """Return a flag's value: of the line that is typed, else of the environment, else its default."""
    return str(context.params.get(flag) or os.environ.get(variable) or default)
