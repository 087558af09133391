"""The shell's completion of the command, by a real bash, with names from a real store."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import loraplex_client as lx
from loraplex.cli.models import registered
from loraplex.cli.options import adapter_names, model_names, worker_ids
from loraplex.cluster.v1 import cluster_pb2
from loraplex.contracts.artifacts.base_model import read_base_model

MODEL = read_base_model("hash:?vocab=1024&seed=3")
NOBODY = "127.0.0.1:1"
# Prints what bash offers for each line, as at the Tab key: the words of the command's function, else files.
SCRIPT = """
source <(loraplex --show-completion)
complete -p loraplex | grep -q -- '-o default' || exit 1
while read -ra COMP_WORDS; do
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  _loraplex_completion loraplex
  [ ${#COMPREPLY[@]} -gt 0 ] || mapfile -t COMPREPLY < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
  echo "${COMPREPLY[@]}"
done
"""


@pytest.fixture
def store(store_address: str, adapter_directory: Path) -> str:
    with lx.StoreClient(store_address, "acme") as client:
        client.register_model(registered(MODEL), MODEL.files)
        digest = client.push(adapter_directory, "support").revision.digest
        client.set_alias("support", "canary", digest)
        client.push(adapter_directory, "sales", alias="canary")
    return store_address


def test_bash_completes_adapters_and_files(store: str, tmp_path: Path) -> None:
    program = tmp_path / "loraplex"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m loraplex.cli "$@"\n')
    program.chmod(0o700)
    (tmp_path / "model").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    python_path = os.pathsep.join([str(Path.cwd()), inherited.get("PYTHONPATH", "")])
    environ = {
        **inherited,
        "PATH": f"{tmp_path}:{inherited['PATH']}",
        "PYTHONPATH": python_path,
        "LORAPLEX_STORE_ADDRESS": store,
    }
    lines = ["loraplex chat --tenant acme -a su", "loraplex up --model mod"]
    bash = subprocess.Popen(
        ["bash", "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, cwd=tmp_path, text=True
    )
    with bash:
        said, _ = bash.communicate("\n".join([*lines, ""]))
    assert said.splitlines() == ["support support@canary", "model"]


def context(**flags: str) -> typer.Context:
    """Return the context of a command's line with these flags."""
    typed = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    typed.params = dict(flags)
    return typed


def test_names_of_a_running_cluster(store: str, server: Any) -> None:
    assert adapter_names(context(store=store, tenant="acme"), "") == ["sales@canary", "support", "support@canary"]
    assert adapter_names(context(store=store, tenant="globex"), "") == []
    assert adapter_names(context(store=NOBODY), "") == []
    server.service.workers = [cluster_pb2.Worker(worker_id="w-1"), cluster_pb2.Worker(worker_id="w-2")]
    for router, models, workers in ((server.address, ["tiny"], ["w-1", "w-2"]), (NOBODY, [], [])):
        assert model_names(context(router=router), "t") == models
        assert worker_ids(context(router=router), "w") == workers
