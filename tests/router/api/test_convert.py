"""Checks of a request that need only its message."""

from __future__ import annotations

import pytest
from loraplex.inference.v1 import inference_pb2 as pb

from router.api.convert import read_request
from rpc.errors import InvalidField


def test_priority_has_its_range() -> None:
    assert read_request(pb.GenerateSpec(prompt="x", priority=-100), "acme").priority == -100
    with pytest.raises(InvalidField, match="priority: 101 is not between -100 and 100"):
        read_request(pb.GenerateSpec(prompt="x", priority=101), "acme")
