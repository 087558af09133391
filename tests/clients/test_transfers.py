"""Imports and exports by the command and the SDK, against a store of its own process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import loraplex_client as lx
from loraplex.cli.__main__ import main
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model
from tests.adapter_store.sources.places import OciRegistry, served

MODEL = read_base_model("hash:?vocab=1024")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a store that may import from folders of the tests and export to a registry."""
    place = tmp_path_factory.mktemp("store")
    sources = place / "sources.toml"
    with served(OciRegistry().answer) as url:
        sources.write_text(
            f'[[source]]\nprefix = "file://{tmp_path_factory.getbasetemp()}"\n[[source]]\n'
            f'prefix = "oci://registry.test/acme"\nendpoint = "{url}"\nallow_private = true\nexport = true\n'
        )
        command = [sys.executable, "-m", "loraplex.adapter_store", "--port", "0", "--data", str(place / "data")]
        with subprocess.Popen([*command, "--sources", str(sources)], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                address = process.stdout.readline().split()[1].removeprefix("store=")
                with lx.StoreClient(address, "acme") as client:
                    client.register_model(registered(MODEL), MODEL.files)
                yield address
            finally:
                process.terminate()


def test_an_adapter_is_imported_exported_and_imported_again(
    store: str, adapter_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["loraplex", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    monkeypatch.setattr(os, "environ", {**os.environ, "LORAPLEX_STORE_ADDRESS": store, "LORAPLEX_TENANT": "acme"})
    (adapter_directory / "adapter_model.bin").write_bytes(b"pickle")
    code, out, err = run("adapters", "import", f"file://{adapter_directory}", "--name", "support")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("imported tenants/acme/adapters/support/revisions/sha256:")
    assert lines[1:] == [
        f"from file://{adapter_directory}",
        "adapter_model.bin was left out: adapter_model.safetensors was taken",
    ]
    code, out, _ = run("adapters", "export", "support", "oci://registry.test/acme/support:v1")
    assert (code, out.startswith("oci://registry.test/acme/support@sha256:")) == (0, True)
    source = "oci://registry.test/acme/support:v1"
    code, out, _ = run("adapters", "import", source, "--name", "back", "--alias", "canary", "--json")
    imported = json.loads(out)
    assert (code, imported["created"], imported["provenance"]["uri"]) == (0, True, source)
    assert lines[0].endswith(imported["digest"])
    shown = json.loads(run("adapters", "show", "back", "--json")[1])
    assert shown["revisions"][0]["provenance"]["pin"] == imported["provenance"]["pin"]
    assert shown["aliases"] == {"canary": imported["digest"]}
    code, _, err = run("adapters", "import", "s3://acme/support", "--name", "support")
    assert (code, "acme may not import from s3://acme/support" in err) == (2, True)
    code, _, err = run("adapters", "import", f"file://{adapter_directory}", "--name", "a/b/c")
    assert (code, err.count("\n"), "--name" in err) == (2, 1, True)


def test_both_clients_tell_the_progress(store: str, adapter_directory: Path) -> None:
    told: list[tuple[int, int]] = []

    async def run() -> lx.Pushed:
        async with lx.AsyncStoreClient(store, "acme") as client:
            source = f"file://{adapter_directory}"
            return await client.import_revision(source, "a", progress=lambda *one: told.append(one))

    first = asyncio.run(run())
    with lx.StoreClient(store, "acme") as client:
        second = client.import_revision(f"file://{adapter_directory}", "b", progress=lambda *one: told.append(one))
        exported = client.export_revision("b", "oci://registry.test/acme/b:v1")
    assert first.revision.digest == second.revision.digest == exported.revision.digest
    assert second.revision.provenance is not None
    assert {file.path for file in second.revision.provenance.files} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    total = sum(path.stat().st_size for path in adapter_directory.iterdir())
    assert told[-1] == (total, total)
