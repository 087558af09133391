"""bench.kernels: each form against the ceiling of its bytes and products, which bare loops measure."""

from __future__ import annotations

import pytest

from bench import processor
from bench.kernels import AIMS, Setup, measure
from loraplex.kernels.weight_vectors import HAS_PAIRS, V

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_form_is_held_against_the_ceilings() -> None:
    report = measure(Setup(outputs=64, columns=64, rows=(1, 8), weights_bytes=2**18, rounds=1), quick=True)
    *table, ceilings = report.rows
    assert [row["rows"] for row in table] == ["1", "8"]
    assert all(
        row.keys() == {"rows", "float32", "auto", "int8", "int8-dynamic", "int4", "int4-dynamic"} for row in table
    )
    assert all(rate > 0 for rate in ceilings.values())
    assert report.ratios.keys() < AIMS.keys()
    assert {"int8_over_bfloat16_1", "auto_of_ceiling_8"} <= report.ratios.keys()


@pytest.mark.skipif(not processor.products(), reason="no AVX2 on this processor")
def test_the_loops_are_of_what_the_processor_has() -> None:
    assert processor.operations_per_s("float32") > 0
    assert (processor.operations_per_s("bfloat16") > 0) == HAS_PAIRS
    assert V == 16 or processor.operations_per_s("int8") == 0.0
