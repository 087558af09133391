"""A server that can't be used is told in one line, without its password."""

from __future__ import annotations

import pytest

from broker.connection import RedisUnreachableError, connect


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:s3cret@127.0.0.1:1/0", "redis://user:***@127.0.0.1:1/0: no answer"),
        ("redis://:s3cret@127.0.0.1:1", "redis://:***@127.0.0.1:1: no answer"),
        ("http://user:s3cret@127.0.0.1", "http://user:***@127.0.0.1: "),
    ],
)
async def test_a_server_that_does_not_answer_is_named_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(RedisUnreachableError) as caught:
        await connect(url)
    assert shown in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
