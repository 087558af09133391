"""Schemas of tools as MCP servers publish them, in `tests/mcp_tools`: a file for each server, or library of one.

Servers write them with zod, pydantic, reflectors of Go, C#, Java and Rust, from OpenAPI, or by hand, in every draft.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.request import Tool
from loraplex.runtime.rpc.errors import InvalidField
from tests.router.generation.test_tool_grammar import call_of, proven, takes

FILES = {path.stem: path for path in (Path(__file__).parents[2] / "mcp_tools").glob("*.json")}


def published(server: str) -> list[dict[str, Any]]:
    return json.loads(FILES[server].read_text())  # type: ignore[no-any-return]


def tool(published: dict[str, Any], *, strict: bool = False) -> Tool:
    return Tool(published["name"], "", json.dumps(published["inputSchema"]), strict)


def test_there_are_300() -> None:
    assert sum(len(published(server)) for server in FILES) >= 300


@pytest.mark.parametrize("server", sorted(FILES))
def test_a_server_s_tools_make_a_grammar(server: str) -> None:
    tools = published(server)
    calls = proven(tuple(map(tool, tools)))
    names = [f"chat.tools[{index}].parameters" for index in range(len(tools))]
    assert all(path.startswith(tuple(names)) for path in calls.not_enforced)
    # Tools that are not named are enforced: a required property must not be missing.
    for name, one in zip(names, tools, strict=True):
        required = one["inputSchema"].get("required")
        if required and not any(path.startswith(name) for path in calls.not_enforced):
            assert not takes(calls.text, call_of(one["name"], {}))


@pytest.mark.parametrize("server", sorted(FILES))
def test_a_strict_tool_is_enforced_or_refused_by_its_path(server: str) -> None:
    for one in published(server):
        if proven((tool(one),)).not_enforced:
            with pytest.raises(InvalidField, match=r"^chat.tools\[0\].parameters"):
                proven((tool(one, strict=True),))
        else:
            proven((tool(one, strict=True),))
