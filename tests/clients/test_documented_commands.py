"""The documentation names commands, flags, files and headings that exist, and every reason of an error."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from loraplex.adapter_store.app import StoreSettings
from loraplex.cli.__main__ import app
from loraplex.gateway.settings import GatewaySettings
from loraplex.operator.scaler.settings import ScalerSettings
from loraplex.operator.settings import OperatorSettings
from loraplex.router.settings import RouterSettings
from loraplex.worker.cluster_plan import LoadSettings
from loraplex.worker.engine_api import FailureReason
from loraplex.worker.io.settings import WorkerSettings
from loraplex.worker.plan import PlanSettings

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*/README.md"))]
# A line of a code block that begins with the command, and those that follow a backslash; or code in a sentence.
COMMANDS = re.compile(r"^(?: {4}|)loraplex ((?:[^\n]*\\\n)*[^\n]*)$|`loraplex ([^`]+)`", re.MULTILINE)
LINKS = re.compile(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)")
# Commands that read their own arguments, and what these are.
SETTINGS = {
    "router": (RouterSettings,),
    "worker": (WorkerSettings,),
    "store": (StoreSettings,),
    "gateway": (GatewaySettings,),
    "scaler": (ScalerSettings,),
    "operator": (OperatorSettings,),
    "plan": (PlanSettings, LoadSettings),
}
FLAGS = {"backup": {"--from", "--to"}, "probe": {"--ca", "--cert", "--key"}}


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page, each as a line."""
    for command in COMMANDS.finditer(page.read_text(encoding="utf-8")):
        yield re.sub(r"\s*\\\n\s*", " ", command[1] or command[2]).replace("\n", " ")


@cache
def root() -> Any:
    return typer.main.get_command(app)


def unknown(line: str) -> list[str]:
    """Return the words of a line that the command does not know."""
    words = shlex.split(line, comments=True)
    ends = [at for at, word in enumerate(words) if word in ("|", ">", ">>", "<", "&&", "&")]
    words = words[: ends[0]] if ends else words
    command, flags = root(), {"--help"}
    while True:
        flags |= {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        while words and words[0] in flags and hasattr(command, "commands"):  # a flag before the command, and its value
            del words[:2]
        if not words or not hasattr(command, "commands"):
            break
        name = words.pop(0)
        if name.isupper():  # a placeholder
            return []
        if name not in command.commands:
            return [name]
        command = command.commands[name]
        flags |= {"--" + one.name.replace("_", "-") for cls in SETTINGS.get(name, ()) for one in fields(cls)}
        flags |= FLAGS.get(name, set())
    return [word for word in words if re.match("--?[a-z]", word) and word.partition("=")[0] not in flags]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    unknown_words = {line: unknown(line) for line in commands(page)}
    assert {line: words for line, words in unknown_words.items() if words} == {}


def test_what_a_page_gets_wrong() -> None:
    assert unknown("adapters lits") == ["lits"]
    assert unknown("generate 'Hi' -a x --temprature 1 | head -3") == ["--temprature"]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for path, anchor in LINKS.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or target.suffix != ".md" or anchor in headings(target), f"{path}#{anchor}"


def test_every_reason_of_an_error_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    rooms = ("adapter_store", "loraplex", "router")
    code = "".join(path.read_text(encoding="utf-8") for room in rooms for path in (ROOT / room).rglob("*.py"))
    reasons = {*re.findall(r"\breason ?= ?\"([A-Z_]+)\"", code), *get_args(FailureReason)}
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()


def test_contributing_draws_the_rooms_as_the_contract_has_them() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    drawing = "```\n" + "\n".join(contracts[0]["layers"]).replace("loraplex.", "") + "\n```"
    assert drawing in (ROOT / "CONTRIBUTING.md").read_text()
