"""Fields of Anthropic's protocol for which the cluster's has no field of the same meaning."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.gateway.anthropic_api import (
    MESSAGES,
    CountRequest,
    CustomTool,
    MessagesRequest,
    conversation,
    options_of,
)
from loraplex.gateway.errors import HttpError
from loraplex.gateway.exchange import encode


def read(**fields: Any) -> dict[str, Any]:
    body = {"model": "a", "max_tokens": 64_000, "messages": [{"role": "user", "content": "x"}], **fields}
    return MESSAGES.read(encode(body))


@pytest.mark.parametrize(("fields", "text"), [({"is_error": True}, "Error: no file"), ({"is_error": False}, "no file")])
def test_a_failed_call_is_told(fields: Any, text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "no file"}], **fields}
    chat = conversation(read(messages=[{"role": "user", "content": [result]}]))
    assert chat.messages == [{"role": "tool", "tool_call_id": "t", "content": text}]


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, None),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_thinking_that_is_disabled_reaches_the_template(fields: Any, variables: Any) -> None:
    assert options_of(read(**fields)).get("template_args") == variables


def test_a_budget_of_thinking_is_read() -> None:
    assert options_of(read(thinking={"type": "enabled", "budget_tokens": 1024}))["thinking_token_budget"] == 1024
    for wrong in (-1, "many", None):
        with pytest.raises(HttpError, match=r"thinking\.budget_tokens: .* is not a number of tokens"):
            options_of(read(thinking={"type": "enabled", "budget_tokens": wrong}))


def test_a_tool_without_a_type_is_the_client_s_own() -> None:
    whole = {"type": "", "name": "f", "input_schema": {}}
    assert options_of(read(tools=[whole]))["tools"][0]["name"] == "f"
    with pytest.raises(HttpError, match=r"tools\[0\]\.input_schema: is required"):
        read(tools=[{"type": ""}])


def test_every_field_that_the_package_declares_is_known() -> None:
    """The gateway does not import the package, which takes seconds."""
    from anthropic.types import MessageCountTokensParams, ToolParam
    from anthropic.types.message_create_params import MessageCreateParamsBase

    pairs: list[tuple[Any, Any]] = [
        (MessagesRequest, MessageCreateParamsBase),
        (CountRequest, MessageCountTokensParams),
        (CustomTool, ToolParam),
    ]
    for own, declared in pairs:
        assert declared.__annotations__.keys() <= own.__annotations__.keys()
        assert declared.__required_keys__ == own.__required_keys__
