"""The session of a request over HTTP, by the fields of each protocol: it keeps a conversation on one revision."""

from __future__ import annotations

import pytest

from loraplex.gateway.anthropic_api import options_of
from loraplex.gateway.openai_api import common_options


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({}, None),
        ({"user": "ann"}, "ann"),
        ({"user": "ann", "prompt_cache_key": "chat 7"}, "chat 7"),
        ({"user": "a" * 300}, "a" * 256),
    ],
)
def test_openai_s_fields_name_the_session(fields: dict[str, str], session: str | None) -> None:
    assert common_options({"model": "m", **fields}).get("session_id") == session


@pytest.mark.parametrize(
    ("fields", "session"), [({}, None), ({"metadata": {}}, None), ({"metadata": {"user_id": "ann"}}, "ann")]
)
def test_anthropic_s_user_is_the_session(fields: dict[str, object], session: str | None) -> None:
    request = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], **fields}
    assert options_of(request).get("session_id") == session
