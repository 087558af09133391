"""`loraplex up` as a process, over the directory of an earlier run; and a base model that is another than there."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from loraplex_client import AsyncClient, AsyncStoreClient

from adapter_store.app import Store, StoreSettings
from artifacts.base_model import read_base_model
from clients.cli.launch import LaunchPlan, _fill
from clients.cli.models import registered
from clients.cli.terminal import Activity, CommandError
from clients.cli.upload_tree import AdapterTree
from deploy.local import ClusterSettings

MODEL = read_base_model("hash:", "tiny")


def write(directory: Path, weights: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


async def test_a_restart_serves_what_was_live(tmp_path: Path) -> None:
    data, adapters = tmp_path / "data", tmp_path / "adapters"
    support = write(adapters / "acme" / "support", b"first")
    earlier = Store(StoreSettings(data=data / "store", port=0))
    await earlier.start()
    async with AsyncStoreClient(f"127.0.0.1:{earlier.port}", "acme") as client:
        await client.register_model(registered(MODEL), MODEL.files)
        first = (await client.push(support, "support")).revision.digest
    await earlier.stop(drain_s=0)
    write(support, b"second")
    write(adapters / "polite", b"new")
    (adapters / "acme" / "broken").mkdir()

    flags = f"--model hash: --name tiny --adapters {adapters} --data-dir {data} --port 0 --store-port 0"
    flags += " --router-processes 2"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    command = [sys.executable, "-m", "clients.cli", "up", *flags.split()]
    up = await asyncio.create_subprocess_exec(*command, env=environ, stdout=PIPE, stderr=PIPE)
    try:
        assert up.stdout is not None
        lines = [(await up.stdout.readline()).decode() for _ in range(5)]
        addresses = dict(word.split("=") for word in lines[1].split()[1:])
        async with AsyncClient(addresses["router"], "acme") as routers:
            answer = await routers.generate("x", adapter_id="support", max_tokens=3)
    finally:
        up.send_signal(signal.SIGINT)
        _, said = await up.communicate()
    steps = said.decode()
    assert up.returncode == 0
    assert lines[0].startswith(f"tenants/acme/adapters/support: live stays at {first[:19]}")
    assert [line.split()[0] for line in lines[1:]] == ["ready", "metrics", "logs", "data"]
    assert lines[4] == f"data {data}, kept\n"
    assert not [log for log in (data / "logs").iterdir() if log.stat().st_mode & 0o077], "others may read them"
    assert answer.adapter_revision.endswith(first)
    assert "acme/broken is not an adapter: it has no adapter_config.json; the others are served" in steps
    assert ["uploading adapter acme/support" in steps, "uploading adapter shared/polite" in steps] == [True, True]


async def test_another_base_model_of_the_same_name_is_refused(store: str) -> None:
    async with AsyncStoreClient(store) as client:
        await client.register_model(registered(MODEL), MODEL.files)
    other = read_base_model("hash:?seed=9", "tiny")
    settings = ClusterSettings(model="hash:?seed=9", model_name="tiny")
    plan = LaunchPlan(settings, other, AdapterTree(), update=False, demo=False, once=False)
    with pytest.raises(CommandError, match=r"^--model hash:\?seed=9: .* --name, or another directory with --data-dir"):
        await _fill(plan, store, Activity())
