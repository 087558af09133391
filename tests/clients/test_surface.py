"""Test the public names of the SDK's two halves, and the modules that they import."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import loraplex_client as lx

SHIPPED = {"loraplex.inference", "loraplex.adapters", "loraplex.batches"}


@pytest.mark.parametrize(
    ("blocking", "on_asyncio"), [(lx.Client, lx.AsyncClient), (lx.StoreClient, lx.AsyncStoreClient)]
)
def test_sync_and_async_take_the_same(blocking: type, on_asyncio: type) -> None:
    def methods(cls: type) -> dict[str, list[inspect.Parameter]]:
        members = inspect.getmembers(cls, inspect.isfunction)
        return {
            name: list(inspect.signature(one).parameters.values()) for name, one in members if not name.startswith("_")
        }

    assert methods(blocking) == methods(on_asyncio)
    assert inspect.signature(blocking).parameters == inspect.signature(on_asyncio).parameters


def test_every_public_name_is_there() -> None:
    assert [name for name in lx.__all__ if not hasattr(lx, name)] == []


def test_the_sdk_stands_alone() -> None:
    code = "import loraplex_client, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.partition(".")[0] for name in modules} & {"bench", "deploy"}
    packages = {".".join(name.split(".")[:2]) for name in modules if name.startswith("loraplex.")}
    assert packages == SHIPPED


@pytest.mark.parametrize("page", ["README.md", "clients/python/README.md", *map(str, Path("docs").rglob("*.md"))])
def test_examples_have_the_present_keywords(page: str) -> None:
    for name, arguments in re.findall(r"\bclient\.(\w+)\(((?:[^()]|\([^()]*\))*)\)", Path(page).read_text()):
        keywords = set(re.findall(r"\b(\w+)=(?!=)", re.sub(r'"[^"]*"|\{[^}]*\}', "", arguments)))
        if not keywords:
            continue
        cls = lx.Client if hasattr(lx.Client, name) else lx.StoreClient
        assert keywords <= set(inspect.signature(getattr(cls, name)).parameters), (name, arguments)
