"""`python -m worker plan` on the shipped model, against the formulas written out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MODEL = "examples/model"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker", "plan", *flags], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_sizes_are_those_of_the_formulas() -> None:
    flags = ("--model", MODEL, "--context", "1024", "--batch", "8", "--adapters", "4", "--rank", "16")
    plan = json.loads(run(*flags, "--memory", "1GiB", "--json").stdout)
    assert plan["weight_bytes"] == plan["parameters"] * 2
    # 2 x 6 layers x 2 KV heads x 64 x 2 bytes
    assert plan["kv_bytes_per_token"] == 2 * 6 * 2 * 64 * 2
    assert plan["kv_bytes"] == 8 * 1024 * plan["kv_bytes_per_token"]
    # q and o are 256 x 256, k and v 256 x 128, gate, up and down 256 x 704; six layers, bfloat16
    assert plan["adapter_bytes"] == 16 * 6 * (2 * 512 + 2 * 384 + 3 * 960) * 2
    assert plan["adapter_slots_bytes"] == 4 * plan["adapter_bytes"]
    usable = int((2**30 - plan["weight_bytes"]) * 0.9) - plan["adapter_slots_bytes"]
    assert plan["sequences_fit"] == usable // (1024 * plan["kv_bytes_per_token"])
    double = json.loads(run(*flags, "--memory", "1GiB", "--dtype", "float32", "--json").stdout)
    assert double["kv_bytes_per_token"] == 2 * plan["kv_bytes_per_token"]


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    done = run("--model", MODEL, "--memory", "20MiB")
    assert done.returncode == 0
    assert "does not fit" in done.stdout
    assert "missing" in done.stdout


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--model", "nowhere"), "error: model: nowhere is not a directory"),
        (("--model", MODEL, "--memory", "much"), "error: --memory much: not a size such as 80GiB or 24GB"),
        (("--model", MODEL, "--batch", "0"), "error: --batch 0: at least 1"),
        (("--model", MODEL, "--dtype", "int3"), "error: --dtype int3: not one of"),
        ((), "error: missing setting: give --model"),
    ],
)
def test_a_mistake_is_one_line(flags: tuple[str, ...], line: str) -> None:
    done = run(*flags)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
