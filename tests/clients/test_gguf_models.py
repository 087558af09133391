"""GGUF files on the command line: imported once into a cache, and adapters converted on their way to the store."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from loraplex.cli.__main__ import app
from loraplex.cli.gguf_models import CACHE_VARIABLE, adapter_name, local_model, run_to_its_end
from loraplex.cli.models import read_model
from loraplex.cli.terminal import CommandError
from loraplex_client import StoreClient
from tests.worker.engine.gguf.test_gguf_adapters import make_adapter
from tests.worker.engine.gguf.written import make_source, write_adapter, write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model."""
    directory = tmp_path_factory.mktemp("tiny") / "source"
    make_source("llama", directory)
    return directory


@pytest.fixture(scope="module")
def file(base: Path) -> Path:
    """The model as a GGUF file."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return write_model(auto.from_pretrained(base), base.with_name("Tiny Model.Q8_0.gguf"), "llama")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of this module's tests."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(directory))
        yield directory / "models"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def imports(cache: Path) -> set[str]:
    """The directories of the cache."""
    return {path.name for path in cache.iterdir() if path.is_dir()}


def test_two_processes_import_a_file_once(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, found = [], []

    def count(command: str, *arguments: Any, **options: Any) -> Any:
        commands.append(command)
        run_to_its_end(command, *arguments, **options)

    both, rename = threading.Barrier(2), Path.rename

    def rename_at_once(path: Path, target: Path) -> Path:
        if target.suffix == ".digest":
            both.wait(60)
        return rename(path, target)

    monkeypatch.setattr("loraplex.cli.gguf_models.run_to_its_end", count)
    monkeypatch.setattr(Path, "rename", rename_at_once)
    # The lock is a file's, of which each thread has its own descriptor, as processes have.
    threads = [threading.Thread(target=lambda: found.append(local_model(str(file)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert commands == ["import-gguf"]
    (directory, name), again = found
    assert again == (directory, name) == local_model(str(file))
    assert name == "Tiny-Model.Q8_0"
    assert imports(cache) == {Path(directory).name}
    assert read_model(directory, name, "int8").quantization == "int8"


def test_what_is_no_gguf_file_stays_as_it_is(base: Path) -> None:
    assert local_model(str(base), "name") == (str(base), "name")
    assert local_model("hash:?") == ("hash:?", "")


def test_a_changed_file_is_imported_anew(
    file: Path, tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    first, name = local_model(str(copy))
    assert (first, name) == (local_model(str(file))[0], "copy")
    before = imports(cache)
    copy.write_bytes(file.read_bytes()[:-2000])
    assert run("models", "push", copy).exit_code == 2
    errors = capfd.readouterr().err.splitlines()
    assert errors[-1].startswith(f"error: {copy}: is truncated: it ends before the end of tensor ")
    assert imports(cache) == before


# tests/worker/engine/gguf has what an import writes, and that it overwrites nothing.
@pytest.mark.nightly
def test_import_writes_a_directory_and_overwrites_none(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "imported"
    assert run("models", "import", file, directory, "--dtype", "float32").exit_code == 0
    assert capfd.readouterr().out.startswith(f"wrote {directory}: llama sha256:")
    assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"
    assert run("models", "import", file, directory).exit_code == 2
    assert capfd.readouterr().err.endswith(f"error: {directory}: exists; give a new directory\n")


@pytest.mark.nightly
def test_ctrl_c_leaves_nothing(file: Path, tmp_path: Path) -> None:
    """The signal goes to the command and its worker, as at a terminal."""
    command = [sys.executable, "-m", "loraplex.cli", "models", "import", str(file), str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("imported 1 of ")
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
    assert "Traceback" not in rest
    # The import may have been faster than the signal.
    assert process.returncode in (130, 0)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["out"])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    part = tmp_path / "big-00001-of-00002.gguf"
    part.touch()
    with pytest.raises(CommandError, match=r"is one of 2 parts, and big-00002-of-00002\.gguf is missing beside it$"):
        local_model(str(part))


async def test_models_and_adapters_are_pushed_as_gguf(
    base: Path, file: Path, cache: Path, tmp_path: Path, store: str
) -> None:
    directory, _ = local_model(str(file))
    pushed = await asyncio.to_thread(run, "models", "push", file, "--name", "tiny", "--store", store)
    assert pushed.output.splitlines()[-1] == f"its workers need: --model {directory}"
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "k_proj", "down_proj"])
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    (tmp_path / "folder").mkdir()
    given = write_adapter(adapter, tmp_path / "folder" / "Support.gguf", auto.from_pretrained(base), "llama")
    assert adapter_name(given) == "Support"
    push = ["adapters", "push", tmp_path / "folder", "--name", "support", "--tenant", "acme", "--store", store]
    refused = await asyncio.to_thread(run, *push)
    assert isinstance(refused.exception, CommandError)
    assert str(refused.exception).endswith(
        "give the adapter's base model with --model-dir, a transformers directory or GGUF"
    )
    done = await asyncio.to_thread(run, *push, "--model-dir", file)
    assert done.exit_code == 0, done.output
    with StoreClient(store, "acme") as client:
        await asyncio.to_thread(client.download, "support", tmp_path / "downloaded")
    before, after = (load_file(where / "adapter_model.safetensors") for where in (adapter, tmp_path / "downloaded"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
