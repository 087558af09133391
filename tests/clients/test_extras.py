"""A command whose packages are not installed says which extra installs them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from loraplex.__main__ import PROCESSES

CODE = """
import sys
sys.modules[sys.argv.pop(1)] = None  # an import of it fails, as where it is not installed
from loraplex.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("starlette", ["gateway", "--port", "0"], "gateway"),
        ("kopf", ["operator", "--namespaces", "llm"], "operator"),
        ("torch", ["worker", "report", "--model=examples/model", "--quantized=int8", "--text=a"], "worker"),
        ("torch", ["worker", "plan", "--model=examples/model", "--tensor-parallel=2"], "worker"),
        ("typer", ["adapters", "list"], "cli"),
    ],
)
def test_a_command_without_its_packages_names_the_extra(package: str, command: list[str], extra: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, package, *command], capture_output=True, text=True, check=False)
    name = "this command" if extra == "cli" else extra
    expected = f"error: {name} needs {package}, which is not installed: pip install 'loraplex[{extra}]'\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_every_process_has_an_extra_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {extra for _, extra, _ in PROCESSES.values()} - {""} <= project["optional-dependencies"].keys()
