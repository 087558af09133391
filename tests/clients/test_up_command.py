"""`loraplex up` as a process, over the directory of an earlier run; and a base model that is another than there."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
import time
import urllib.request
from asyncio.subprocess import PIPE
from pathlib import Path

import httpx2
import pytest

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.cli.launch import LaunchPlan, _fill
from loraplex.cli.local import ClusterSettings
from loraplex.cli.models import registered
from loraplex.cli.terminal import Activity, CommandError
from loraplex.cli.upload_tree import AdapterTree
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex_client import AsyncClient, AsyncStoreClient, LoraplexError, Tls, UnauthenticatedError

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
    command = [sys.executable, "-m", "loraplex.cli", "up", *flags.split()]
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


def certificate_days(metrics: str) -> int:
    """Return the whole days until a process's certificate ends, as its metrics have it."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as answer:
        (line,) = (line for line in answer if line.startswith(b"loraplex_certificate_end_timestamp_seconds "))
    return int((float(line.split()[1]) - time.time()) // 86400)


async def check_callers(addresses: dict[str, str], directory: Path) -> None:
    """Check that the router and the gateway serve callers with acme's key, by TLS, and no others."""
    tls, key = Tls(ca=directory / "ca.pem"), (directory / "keys" / "acme-app.key").read_text().strip()
    for credential, refused in ((key, ""), ("", "no credential"), (key[:-1], "not valid")):
        async with AsyncClient(addresses["router"], tls=tls, api_key=credential) as client:
            if refused:
                with pytest.raises(UnauthenticatedError, match=refused):
                    await client.generate("x", max_tokens=3)
            else:
                assert (await client.generate("x", max_tokens=3)).usage.completion_tokens == 3
    with pytest.raises(LoraplexError):
        async with AsyncClient(addresses["router"], "acme") as plain:
            await plain.generate("x", max_tokens=3)
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    async with httpx2.AsyncClient(verify=context, headers={"authorization": f"Bearer {key}"}) as http:
        models = await http.get(f"https://{addresses['http']}/v1/models")
        asked = {"model": "tiny", "prompt": "x", "max_tokens": 3}
        answer = await http.post(f"https://{addresses['http']}/v1/completions", json=asked)
    operator = {"authorization": f"Bearer {(directory / 'first-operator.key').read_text().strip()}"}
    async with httpx2.AsyncClient(verify=context, headers=operator) as http:
        state = await http.get(f"https://{addresses['http']}/cluster/state")
        usage = await http.get(f"https://{addresses['http']}/cluster/usage", params={"tenant": "acme"})
    assert [state.status_code, usage.status_code] == [200, 200], (state.text, usage.text)
    assert len(state.json()["workers"]) == 1
    assert answer.status_code == 200, answer.text
    assert models.status_code == 200, models.text
    assert [model["id"] for model in models.json()["data"]] == ["tiny"]


async def test_a_secured_cluster_serves_keys_alone_and_stays_as_it_was(tmp_path: Path) -> None:
    """From nothing: TLS at all ports, two tenants with plans and keys, an answer of each; then again over its files."""
    (tmp_path / "teams.yaml").write_text(
        "tenants:\n  acme:\n    plan: {tokens_per_day: 1000}\n"
        "    keys: {app: {scopes: [generate]}}\n"
        "  globex:\n    keys: {app: {}}\n"
    )
    directory = tmp_path / "secured"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    command = [sys.executable, "-m", "loraplex.cli", "up", "--model", "hash:", "--name", "tiny", "--demo"]
    command += ["--secured", str(directory), "--tenants", str(tmp_path / "teams.yaml")]
    command += ["--port", "0", "--store-port", "0", "--http", "0"]
    up = await asyncio.create_subprocess_exec(*command, env=environ, stdout=PIPE, stderr=PIPE)
    try:
        assert up.stdout is not None
        line = ""
        while not line.startswith("ready "):
            line = (await up.stdout.readline()).decode()
            assert line, (await up.communicate())[1].decode()
        addresses = dict(word.split("=") for word in line.split()[1:])
        metrics = dict(word.split("=") for word in (await up.stdout.readline()).decode().split()[1:])
        assert metrics.keys() == {"gateway", "runner", "router-1", "store", "worker-1"}
        answers = set[str]()
        while len(answers) < 2:
            if (line := (await up.stdout.readline()).decode()).startswith("["):
                answers.add(line.partition("]")[0])
        assert answers == {"[acme", "[globex"}
        assert {part: certificate_days(address) for part, address in metrics.items()} == dict.fromkeys(metrics, 364)
        said = ""
        while "Ctrl-C" not in said:
            said += (await up.stdout.readline()).decode()
        assert f"export LORAPLEX_ADDRESS={addresses['router']}" in said
        assert f"--ca {directory}/ca.pem --api-key-file {directory}/keys/acme-app.key generate" in said
        await check_callers(addresses, directory)
    finally:
        up.send_signal(signal.SIGINT)
        await up.communicate()
    assert up.returncode == 0
    assert not [path for path in directory.rglob("*") if path.lstat().st_mode & 0o077], "others may read them"
    kept = files(directory)
    again = await asyncio.create_subprocess_exec(*command, "--once", env=environ, stdout=PIPE, stderr=PIPE)
    said = (await again.communicate())[0].decode()
    assert again.returncode == 0
    assert ["[acme]" in said, "[globex]" in said] == [True, True]
    assert files(directory) == kept


def files(directory: Path) -> dict[str, bytes]:
    """Return the certificates and keys of a directory."""
    return {path.name: path.read_bytes() for path in (*directory.glob("*.*"), *(directory / "keys").iterdir())}


async def test_another_base_model_of_the_same_name_is_refused(store: str) -> None:
    async with AsyncStoreClient(store) as client:
        await client.register_model(registered(MODEL), MODEL.files)
    other = read_base_model("hash:?seed=9", "tiny")
    settings = ClusterSettings(model="hash:?seed=9", model_name="tiny")
    plan = LaunchPlan(settings, other, AdapterTree(), update=False, demo=False, once=False)
    with pytest.raises(CommandError, match=r"^--model hash:\?seed=9: .* --name, or another directory with --data-dir"):
        await _fill(plan, store, Activity())
