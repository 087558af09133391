"""Rehearse bench.gpu on the CPU with a model that takes milliseconds: every part gives its figures. No times."""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import device_checks, gpu
from bench.models import LLAMA3_8B
from tests.worker.engine.triton_runs import BLOCK_ABSENT

REHEARSAL = gpu.SETUPS["rehearsal"]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for figures; the model is written beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.nightly
@pytest.mark.model
def test_every_part_gives_its_figures_and_together_they_are_the_page(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tests and the sanitizer's programs are the suite's own, which runs them interpreted."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "1 failed, 2 passed, 3 skipped in 4 s", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")

    def run_part(setup: gpu.Setup, part: str, out: Path, timeout_s: float) -> bool:
        assert timeout_s < 480
        gpu.write_part(setup, part, out)
        return True

    monkeypatch.setattr(gpu, "_run_part", run_part)
    # The first call is cut off after a few parts; the next one goes on, on a machine without the model.
    assert gpu.run_parts(REHEARSAL, ["checks", "waits", "sanitizer", "model"], out) == 0
    before = json.loads((out / "parts.json").read_text())
    assert len(before) == 4
    assert (REHEARSAL.model / "complete").exists()
    shutil.rmtree(REHEARSAL.model)
    assert gpu.run_parts(REHEARSAL, list(gpu.PARTS), out) == 0
    after = json.loads((out / "parts.json").read_text())
    assert {part: after[part] for part in before} == before
    assert {path.name for path in out.iterdir()} == {"parts.json", "gpu.json", "gpu.md"}
    assert "8 of 8 parts" in capfd.readouterr().err
    assert not REHEARSAL.model.exists(), "what took disk space is gone"
    assert {Path(command[-1]).name for command in commands if "pytest" in command} == {
        path.name for path in Path("tests/gpu").glob("test_*.py")
    }
    assert {Path(command[-2]).name for command in commands if "memcheck" in command} == set(device_checks.KERNELS)
    written = json.loads((out / "gpu.json").read_text())
    assert written["ratios"].keys() == written["aims"].keys() == gpu.AIMS.keys()
    assert all(math.isfinite(value) and value > 0 for value in written["ratios"].values())
    cases = {row["case"]: row for row in written["rows"]}
    assert len(cases) == len(written["rows"])
    for row in cases.values():
        assert 0 <= row["low"] <= row["median"] <= row["high"] < math.inf
    # Rows are work and bytes, adapters too; how many adapters only changes the bytes.
    limits = [cases[f"decode, {case}"]["limit"] for case in ("1 rows, no adapter", "64 rows, no adapter")]
    limits += [cases[f"decode, 64 rows, {case}"]["limit"] for case in ("1 adapter", "8 adapters", "64 adapters")]
    assert limits == sorted(limits)
    assert limits[0] < limits[1] < limits[2]
    assert cases["decode, 64 rows, 64 adapters"]["runs"] == 2
    assert cases["tests/gpu: passed"]["median"] == 2 * len(list(Path("tests/gpu").glob("test_*.py")))
    for step in ("replayed step", "mixed step"):
        assert cases[f"{step}: all kernels"]["median"] > 0
        assert cases[f"{step}: host, without waiting"]["median"] > 0
        assert cases[f"{step}: bytes that must be read"]["median"] > 0
    assert cases["mixed step: size"]["median"] > cases["replayed step: size"]["median"] == 3
    loops = [case for case in cases if case.startswith("closed loop") and case.endswith("adapters")]
    assert len(loops) == 3 * 2
    assert all(cases[f"{case}, longest silence"]["median"] > 0 for case in loops)
    page = (out / "gpu.md").read_text()
    assert "| decode, 64 rows, 64 adapters, ms/step |" in page
    assert "- `lora_of_limit`: " in page


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of parts find no packages but those of a machine that computes on CUDA."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK_ABSENT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they would import what is absent


@pytest.mark.model
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("parts", [["waits"], pytest.param(list(gpu.PARTS), marks=pytest.mark.nightly)])
def test_parts_run_with_the_packages_of_that_machine_alone(parts: list[str], out: Path) -> None:
    assert gpu.run_parts(REHEARSAL, parts, out) == 0
    assert json.loads((out / "parts.json").read_text()).keys() == set(parts)


def test_a_part_that_fails_or_takes_too_long_is_run_again_by_the_next_call(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gpu.run_parts(REHEARSAL, ["steps"], out, timeout_s=0.01) == 1
    assert "steps: not done within" in (said := capfd.readouterr().err)
    assert "0 of 8 parts are there; missing: checks, waits" in said
    assert list(out.iterdir()) == []
    # Figures of another size do not count.
    (out / "parts.json").write_text(json.dumps({"steps": {"setup": "full"}}))
    assert gpu.run_parts(REHEARSAL, ["steps"], out, timeout_s=0.01) == 1


@pytest.mark.nightly
def test_a_part_ends_with_the_programme_that_runs_it(out: Path) -> None:
    """A call that is cut off leaves nothing that the next one would measure beside."""
    programme = (
        "from pathlib import Path; from bench import gpu; "
        f"gpu.run_parts(gpu.SETUPS['rehearsal'], ['steps'], Path({str(out)!r}), timeout_s=100)"
    )
    with subprocess.Popen([sys.executable, "-c", programme], stderr=subprocess.PIPE) as cut:
        assert cut.stderr is not None
        cut.stderr.readline()  # the part is about to start
        children = Path(f"/proc/{cut.pid}/task/{cut.pid}/children")
        while not (part := children.read_text()):
            assert cut.poll() is None, "it starts the part"
        with open(os.pidfd_open(int(part))) as ended:
            cut.kill()
            assert select.select([ended], [], [], 50)[0], "the part goes on"


def test_a_test_that_fails_and_a_finding_of_the_sanitizer_fail_their_parts(tmp_path: Path) -> None:
    files = len(list(Path("tests/gpu").glob("test_*.py")))
    with pytest.raises(RuntimeError, match=rf"(?s)(ended with 3:\n[^\n]*broken.*){{{files}}}"):
        device_checks.run_tests(["-c", "print('broken'); raise SystemExit(3)"])
    tool = tmp_path / "sanitizer"
    tool.write_text("#!/bin/sh\necho Invalid read; exit 9\n")
    tool.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"ended with 9:\nInvalid read"):
        device_checks.run_sanitizer(["row_cases.py"], tool=str(tool))
    [row] = device_checks.run_sanitizer(tool=str(tmp_path / "none")).rows
    assert row["case"].endswith("is not here")


def test_the_full_model_has_the_real_shape() -> None:
    assert LLAMA3_8B.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert 2 * (LLAMA3_8B.linear_parameters + LLAMA3_8B.head_parameters) == pytest.approx(15.0e9, rel=0.01)
    assert 2 * 64 * LLAMA3_8B.adapter_parameters(gpu.RANK) == pytest.approx(5.37e9, rel=0.01)
    full = gpu.SETUPS["full"]
    assert full.shape is LLAMA3_8B
    assert (full.steps.context, full.steps.prefill) == (512, 4096)
    assert (full.load.rows, full.load.adapters, full.load.prompt, full.load.answer) == ((64, 256), (0, 1, 64), 512, 128)
    # The timed steps have the context in their middle.
    steps = full.steps
    assert steps.prompt + steps.steps + steps.windows * steps.steps // 2 == steps.context


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.gpu"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "no CUDA device: torch finds none, so there is nothing to measure\n"
