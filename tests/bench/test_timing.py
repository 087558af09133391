"""The area under the curve by which bench.timing tells how well two kinds of times can be told apart."""

from __future__ import annotations

import pytest

from bench.timing import auc


@pytest.mark.parametrize(
    ("ones", "others", "area"),
    [
        ([1, 2, 3], [4, 5, 6], 1.0),
        ([4, 5, 6], [1, 2, 3], 1.0),
        ([1, 2, 3], [1, 2, 3], 0.5),
        ([1, 1], [1, 1], 0.5),
        ([1, 4], [2, 3], 0.5),
        ([1, 2, 4], [3], 2 / 3),
    ],
)
def test_the_area_is_that_of_the_best_threshold_either_way(ones: list[float], others: list[float], area: float) -> None:
    assert auc(ones, others) == pytest.approx(area)
