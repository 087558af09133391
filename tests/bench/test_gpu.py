"""bench.gpu on the CPU with a model that takes milliseconds: every row and ratio is there and is a number. No times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.device_peers import PeerSetup
from bench.device_steps import StepSetup
from bench.gpu_page import page
from bench.models import LLAMA3_8B, TINY
from bench.workload import Workload

SETUP = gpu.Setup(
    TINY,
    PeerSetup(Workload(requests=4, prompt=12, short=2, long=4), static_requests=3, rounds=1),
    repeats=1,
    steps=StepSetup(context=24, prefill=600, windows=2, steps=2),
    buffer_bytes=2**16,
    matrix_side=32,
)


@pytest.mark.model
def test_every_row_and_ratio_is_there(tmp_path: Path) -> None:
    report = gpu.measure(SETUP, quick=True, device="cpu")
    report.show()
    report.write(tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["setup"]["shape"]["name"] == "tiny"
    assert written["ratios"].keys() == written["aims"].keys() == gpu.AIMS.keys()
    assert all(math.isfinite(value) and value > 0 for value in written["ratios"].values())
    cases = {row["case"]: row for row in written["rows"]}
    assert len(cases) == len(written["rows"]) == len(gpu.CASES) + 2 + 4
    for row in cases.values():
        assert 0 < row["low"] <= row["median"] <= row["high"] < math.inf
    # Rows are work and bytes, adapters too; how many adapters only changes the bytes.
    limits = [cases[f"decode, {case}"]["limit"] for case in ("1 rows, no adapter", "64 rows, no adapter")]
    limits += [cases[f"decode, 64 rows, {case}"]["limit"] for case in ("1 adapter", "8 adapters", "64 adapters")]
    assert limits == sorted(limits)
    assert limits[0] < limits[1] < limits[2]
    assert cases["decode, 64 rows, 64 adapters"]["runs"] == 2
    written_page = page(report)
    assert "| decode, 64 rows, 64 adapters | ms/step |" in written_page
    assert "| `lora_of_limit` | " in written_page


def test_the_full_model_has_the_real_shape() -> None:
    assert LLAMA3_8B.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert 2 * (LLAMA3_8B.linear_parameters + LLAMA3_8B.head_parameters) == pytest.approx(15.0e9, rel=0.01)
    assert 2 * 64 * LLAMA3_8B.adapter_parameters(gpu.RANK) == pytest.approx(5.37e9, rel=0.01)
    assert gpu.FULL.shape is LLAMA3_8B
    assert (gpu.FULL.steps.context, gpu.FULL.steps.prefill) == (512, 4096)
    # The timed steps have the context in their middle.
    steps = gpu.FULL.steps
    assert steps.prompt + steps.steps + steps.windows * steps.steps // 2 == steps.context


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main() == 0
    assert capsys.readouterr().out == "no CUDA device: torch finds none, so there is nothing to measure\n"
