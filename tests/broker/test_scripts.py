"""The assembly of the queue's scripts from the files in broker/lua: flags, includes and constants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import broker
from broker import keys, terms
from broker.scripts import SCRIPTS, Scripts

LUA = Path(broker.__path__[0]) / "lua"
NAMES = sorted(path.stem for path in LUA.glob("*.lua"))
CONSTANTS = {name for name, value in vars(terms).items() if isinstance(value, int) and name.isupper()}
# Scripts that take away, or add a bounded amount, run though Redis is out of memory: all but those that admit requests.
REFUSED_WHEN_FULL = {"enqueue", "ledger_reserve"}


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_whole(name: str) -> None:
    text = SCRIPTS.assemble(name)
    assert text.splitlines()[0] == ("#!lua" if name in REFUSED_WHEN_FULL else "#!lua flags=allow-oom")
    assert "@include" not in text
    assert not CONSTANTS & set(re.findall(r"\w+", text))
    functions = re.findall(r"^local function (\w+)", text, re.MULTILINE)
    assert len(functions) == len(set(functions))
    assert [function for function in functions if len(re.findall(rf"\b{function}\b", text)) == 1] == []


def test_a_census_checks_the_types_of_all_keys_that_tenants_share() -> None:
    rows = re.findall(r"^lp:{MODEL/CELL}:(\w+) +(\w+) ", keys.__doc__ or "", re.MULTILINE)
    table = re.search(r"^local types = {(.*?)}", SCRIPTS.assemble("census"), re.MULTILINE | re.DOTALL)
    assert table is not None
    assert dict(rows) == {"aside": "hash", **dict(re.findall(r"(\w+) = '(\w+)'", table[1]))}


def test_every_include_is_included() -> None:
    included = {name for path in LUA.rglob("*.lua") for name in re.findall(r'@include "(\w+)"', path.read_text())}
    assert included == {path.stem for path in (LUA / "include").glob("*.lua")}


def test_includes_and_constants_can_be_replaced() -> None:
    text = Scripts({"clock": "local now = 7\n"}, {"HOLD_MS": 1234}).assemble("claim")
    assert text.count("local now = 7\n") == 1
    assert "redis.call('TIME')" not in text
    assert "queued + 1234 - now" in text
