"""Test the public names of the SDK's two halves, and the modules that they import."""

from __future__ import annotations

import inspect
import subprocess
import sys

import loraplex_client as lx
import pytest

ROOMS = {
    *("adapter_store", "artifacts", "bench", "broker", "clients", "deploy", "files", "grammars"),
    *("options", "router", "rpc", "telemetry", "tenancy", "worker"),
}
SHIPPED = {"loraplex.inference", "loraplex.adapters"}


@pytest.mark.parametrize(
    ("blocking", "on_asyncio"), [(lx.Client, lx.AsyncClient), (lx.StoreClient, lx.AsyncStoreClient)]
)
def test_sync_and_async_take_the_same(blocking: type, on_asyncio: type) -> None:
    def methods(cls: type) -> dict[str, list[inspect.Parameter]]:
        found = inspect.getmembers(cls, inspect.isfunction)
        return {
            name: list(inspect.signature(one).parameters.values()) for name, one in found if not name.startswith("_")
        }

    assert methods(blocking) == methods(on_asyncio)
    assert inspect.signature(blocking).parameters == inspect.signature(on_asyncio).parameters


def test_the_sdk_stands_alone() -> None:
    code = "import loraplex_client, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.partition(".")[0] for name in modules} & ROOMS
    packages = {".".join(name.split(".")[:2]) for name in modules if name.startswith("loraplex.")}
    assert packages == SHIPPED
