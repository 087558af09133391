"""The weighted sets that one tenant uses at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.messages import AdapterRef, Job, StoppingParams, WeightedRef
from router.dispatch.dispatcher import WEIGHTED_SETS, check_weighted_sets
from rpc.errors import Exhausted

ONE = AdapterRef("r", "sha256:1", 1, 1)
JOB = Job("j", "acme", "tiny", "sha256:0", "here", (1, 2), StoppingParams(100), 1, request_id="j", adapter=ONE)


def of_set(number: int) -> Job:
    """Return a job of a set with a digest of its own."""
    return replace(JOB, adapter=replace(ONE, digest=f"set {number}", parts=(WeightedRef(ONE, 0.5),)))


def test_a_tenants_sets_are_bounded_and_nothing_else_is() -> None:
    others = [of_set(number) for number in range(WEIGHTED_SETS)] * 3
    new = of_set(WEIGHTED_SETS)
    with pytest.raises(Exhausted, match="acme uses 16 weighted sets") as caught:
        check_weighted_sets(new, others)
    assert caught.value.reason == "WEIGHTED_SETS_FULL"
    check_weighted_sets(new, others[: WEIGHTED_SETS - 1])
    for allowed in (
        of_set(3),
        JOB,
        replace(JOB, adapter=None),
        replace(new, tenant="globex"),
        replace(new, resumed=True),
    ):
        check_weighted_sets(allowed, others)
