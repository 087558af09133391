"""Remembered conversations: until their time, in a share of the memory, for their caller alone."""

from __future__ import annotations

import pytest

from loraplex.gateway import turns
from loraplex.gateway.errors import HttpError
from loraplex.gateway.turns import Turns


def _message(text: str) -> list[dict[str, str]]:
    return [{"type": "message", "role": "user", "content": text}]


def test_a_conversation_is_its_caller_s_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("loraplex.gateway.turns.time.monotonic", lambda: now)
    remembered = Turns(kept_s=60)
    remembered.keep("acme", "resp_1", _message("hello"))
    assert remembered.items("acme", "resp_1") == _message("hello")
    with pytest.raises(HttpError, match="not found"):
        remembered.items("globex", "resp_1")
    now += 60
    with pytest.raises(HttpError, match="for 60 s at most"):
        remembered.items("acme", "resp_1")
    Turns(kept_s=0).keep("acme", "resp_1", _message("hello"))


def test_a_full_share_costs_its_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_REMEMBERED_BYTES", 1_000)
    remembered = Turns(kept_s=60)
    remembered.keep("globex", "other", _message("x" * 100))
    for number in range(20):
        remembered.keep("acme", f"resp_{number}", _message("x" * 100))
    remembered.keep("acme", "too_large", _message("x" * 900))
    assert remembered.items("globex", "other") == _message("x" * 100)
    with pytest.raises(HttpError):
        remembered.items("acme", "too_large")
    remembered.keep("acme", "last", _message("x" * 100))
    assert remembered.items("acme", "last") == _message("x" * 100)
