"""Folders of adapters, aliases and downloads at a real adapter store, by the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import loraplex_client as lx
from loraplex.cli.__main__ import app
from loraplex.cli.models import registered
from loraplex.cli.terminal import CommandError
from loraplex.cli.upload_tree import checked_adapter
from loraplex.contracts.artifacts.base_model import read_base_model

MODEL = read_base_model("hash:?vocab=1024&seed=3")
Run = Callable[..., str]


@pytest.fixture
def run(store_address: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `loraplex adapters ARGUMENTS`, which succeeds, and return what it prints."""
    monkeypatch.setenv("COLUMNS", "200")
    with lx.StoreClient(store_address, "acme") as client:
        client.register_model(registered(MODEL), MODEL.files)

    def call(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["adapters", *arguments, "--store", store_address])
        failed = done.exception
        assert (failed.exit_code if isinstance(failed, CommandError) else done.exit_code) == code, done.output
        return done.output + (str(failed) if failed else "")

    return call


def write(directory: Path, weights: bytes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
    (directory / "adapter_model.safetensors").write_bytes(weights)


def live(store_address: str, name: str) -> str:
    with lx.StoreClient(store_address, "acme") as client:
        return client.get(f"tenants/acme/adapters/{name}")[1].digest


def test_a_folder_that_is_pushed_again_moves_no_alias_unasked(run: Run, store_address: str, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write(root / "acme" / "support", b"first")
    write(root / "polite", b"shared")
    (root / "globex").mkdir()
    said = run("push-all", str(root))
    assert "globex is not an adapter" in said
    assert "the others are served" in said
    first = live(store_address, "support")
    said = run("push-all", str(root))
    assert "live" not in said
    assert "uploading" not in said

    write(root / "acme" / "support", b"second")
    said = run("push-all", str(root))
    assert f"tenants/acme/adapters/support: live stays at {first[:19]}" in said
    assert live(store_address, "support") == first
    assert "live moved from" in run("push-all", str(root), "--update")
    second = live(store_address, "support")
    assert second != first

    assert f"live moved from {second[:19]} to {first}" in run("rollback", "support", "--tenant", "acme")
    assert "nothing to roll back to" in run("rollback", "support", "--tenant", "acme", code=2)
    assert f"canary is {second}" in run("alias", "support", "canary", second[7:19], "--tenant", "acme")
    assert f"live is {second}" in run("alias", "support", "live", "canary", "--tenant", "acme")
    assert "canary is removed" in run("alias", "support", "canary", "--remove", "--tenant", "acme")
    assert "has no alias or revision 'nothing'" in run(
        "alias", "support", "live", "nothing", "--tenant", "acme", code=2
    )
    here = tmp_path / "downloaded"
    assert second in run("download", "support", str(here), "--tenant", "acme")
    assert (here / "adapter_model.safetensors").read_bytes() == b"second"
    assert "is not an empty directory" in run("download", "support", str(here), "--tenant", "acme", code=2)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {f"checkpoint-{step}/adapter_config.json": "{}" for step in (1000, 500, 9)},
            "is not an adapter, but the parent of checkpoints: give one of the 3 below it, such as {}/checkpoint-1000",
        ),
        (
            {"polite/adapter_config.json": "{}"},
            "but the parent of adapters: give one of the 1 below it, such as {}/polite",
        ),
        (
            {"snapshots/0a1b/adapter_config.json": "{}"},
            "but the root of a hub's cache: give one of the 1 below it, such as",
        ),
        (
            {"adapter_config.json": "{}", "adapters.safetensors": "x"},
            "as MLX does: `loraplex adapters push {}` converts",
        ),
        (
            {"adapter_config.json": "{}", "adapter_model-00001-of-00002.safetensors": "x"},
            "has its weights in 1 files; join",
        ),
        (
            {"adapter_config.json": "{}", "pytorch_model_fsdp_0/.metadata": "x"},
            "has no adapter_model.safetensors, but pytorch_model_fsdp_0, FSDP's shards: train with",
        ),
        ({"config.json": "{}"}, "is not an adapter, but a whole model: `loraplex models push`"),
        ({"support.gguf": "GGUF"}, "/support.gguf --model-dir BASE` converts and uploads it"),
        ({"adapter_config.json": "{}", "adapter_model.bin": "x"}, "has its weights in adapter_model.bin, a pickle,"),
        (
            {"adapter_config.json": "{}", "adapter_model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
            "has a pointer of git-lfs as adapter_model.safetensors, and not the file: run `git lfs pull` there",
        ),
    ],
)
def test_an_adapter_as_others_leave_it_is_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    message = message.replace("{}", str(tmp_path))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CommandError, match=re.escape(message)):
        checked_adapter("acme", "support", tmp_path)
    with (
        lx.StoreClient("127.0.0.1:1", "acme") as client,
        pytest.raises(lx.InvalidRequestError, match=re.escape(message)),
    ):
        client.push(tmp_path, "support")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("s3://acme/lora", "the store fetches it: `loraplex adapters import s3://acme/lora --name NAME`"),
        ("https://huggingface.co/acme/lora/tree/v2", "`loraplex adapters import hf://acme/lora@v2 --name NAME`"),
        ("https://example.com/lora", "is no directory; download it, or let the store fetch it from one of hf, s3, gs,"),
        ("Acme/Lora-1.5", "from a hub: `loraplex adapters import hf://Acme/Lora-1.5 --name Lora-1.5`"),
        ("/nowhere/support", "/nowhere/support does not exist"),
    ],
)
def test_what_is_no_directory_here_is_told_what_to_type(given: str, message: str) -> None:
    failed = CliRunner().invoke(app, ["adapters", "push", given, "--store", "127.0.0.1:1"]).exception
    assert isinstance(failed, CommandError)
    assert message in str(failed)


def test_a_push_without_a_name_takes_the_directorys(run: Run, store_address: str, tmp_path: Path) -> None:
    adapter = tmp_path / "support"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"x")
    with lx.StoreClient(store_address, "acme") as client:
        client.register_model(registered(MODEL), MODEL.files)
    assert run("push", str(adapter), "--tenant", "acme").startswith("pushed tenants/acme/adapters/support/revisions/")


def test_a_folder_whose_adapters_are_all_refused_is_an_error(run: Run, tmp_path: Path) -> None:
    for name in ("support", "sales"):
        write(tmp_path / "acme" / name, b"first")
        (tmp_path / "acme" / name / "certificate_prompts.jsonl").write_text("none\n")
    said = run("push-all", str(tmp_path), code=2)
    assert [f"acme/{name}: " in said for name in ("support", "sales")] == [True, True]
    assert said.endswith("none of 2 adapters was uploaded")
    assert run("push-all", str(tmp_path), "--model", "nobody", code=2).startswith("base model not found: nobody; ")


def test_an_adapter_without_live_is_shown(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "new", b"first")
    run("push", str(tmp_path / "new"), "--name", "new", "--alias", "canary", "--tenant", "acme")
    shown = json.loads(run("show", "new", "--tenant", "acme", "--json"))
    assert (shown["revision"], list(shown["aliases"])) == ("", ["canary"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--name", "A B"], "--name: "),
        (["--name", "a", "--alias", "A B"], "--alias: "),
    ],
)
def test_a_refused_push_names_the_flag(run: Run, tmp_path: Path, flags: list[str], named: str) -> None:
    write(tmp_path / "a", b"weights")
    output = run("push", str(tmp_path / "a"), "--tenant", "acme", *flags, code=2)
    assert "header." not in output
    assert named in output
