"""`loraplex releases` against a real store: a release's life by the command, and what it says of mistakes.

tests/e2e/test_releases.py runs the guide's quickstart, with gates that ask a cluster.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.cli.terminal import CommandError
from loraplex_client import AsyncStoreClient, FitnessCertificate

NAME = "tenants/acme/adapters/support"
GATES = '[[certificate]]\nname = "int8"\nquantization = "int8"\n'


def write(directory: Path, weights: str, rank: int) -> Path:
    """Write an adapter of the hash model."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (directory / "adapter_model.safetensors").write_text(weights)
    return directory


class Command:
    """The command, as tenant acme at a store."""

    def __init__(self, store: str) -> None:
        self.store = store

    async def __call__(self, *arguments: str) -> str:
        """Run a command; returns what it printed. Raises CommandError."""
        words = (*arguments, "--tenant", "acme", "--store", self.store)
        result = await asyncio.to_thread(CliRunner().invoke, app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.stdout

    async def fails(self, *arguments: str) -> str:
        """Run a command that fails; returns its one line."""
        with pytest.raises(CommandError) as error:
            await self(*arguments)
        return str(error.value)


async def test_a_release_s_life(store: str, tmp_path: Path) -> None:
    command = Command(store)
    await command("models", "push", "hash:?")
    await command("adapters", "push", str(write(tmp_path / "one", "first", 4)), "--name", "support")
    assert "has no releases" in await command.fails("releases", "history", "support")
    origin = ("--run-id", "run 7", "--dataset", "chats", "--source", "s3://models/support", "--pin", "v3")
    said = await command("releases", "push", str(write(tmp_path / "two", "second", 8)), "--name", "support", *origin)
    assert said == f"{NAME}/releases/1 is verified: its files are what their digests say\n"
    assert "no release that is canary, qualified" in await command.fails("releases", "promote", "support")

    (tmp_path / "gates.toml").write_text(GATES)
    qualify = ("releases", "qualify", "support", "--gates", str(tmp_path / "gates.toml"))
    assert await command.fails(*qualify) == "1 of 1 gates failed"
    async with AsyncStoreClient(store, "acme") as client:
        release = json.loads(await command("releases", "history", "support", "--json"))
        _, revision = await client.get(f"support@{release['digest']}")
        figures = FitnessCertificate("int8", revision.base_digest, 1, False, 10, 0.9, 0.01, 0.1)
        await client.certify(revision.name, figures)
    said = await command(*qualify)
    assert said.splitlines() == [
        "passed int8 agreement=0.9 max_kl=0.1 mean_kl=0.01",
        f"{NAME}/releases/1 is qualified: gates passed: 1",
    ]

    differs = await command("releases", "diff", "support")
    for field, before, after in (("config.r", "4", "8"), ("origin.run_id", "-", "run 7")):
        row = next(line for line in differs.splitlines() if line.startswith(field))
        assert row.split(maxsplit=2)[1:] == [before, after]
    said = await command("releases", "promote", "support", "--canary", "0.5,25", "--max-ttft-ratio", "1.5")
    assert said == f"{NAME}/releases/1 is canary, 0.5%: step 1 of 2: 0.5%\n"
    assert "canary" in await command("releases", "list", "support")
    assert "is a canary; promote it without steps" in await command.fails(
        "releases", "promote", "support", "--canary", "10"
    )
    assert await command("releases", "promote", "support") == f"{NAME}/releases/1 is live: promoted\n"
    assert "is live; roll it back instead" in await command.fails("releases", "abort", "support#1")
    assert await command("releases", "rollback", "support") == f"{NAME}/releases/1 is rolled back: rolled back\n"
    history = await command("releases", "history", "support")
    for text in ("run 7", "s3://models/support", "failed: int8", "step 1 of 2: 0.5%", "agreement=0.9"):
        assert text in history

    await command("releases", "push", str(write(tmp_path / "three", "third", 8)), "--name", "support")
    assert await command("releases", "abort", "support") == f"{NAME}/releases/2 is retired: aborted\n"
    assert "cannot become" in await command.fails("releases", "abort", "support#2")
    listed = json.loads(await command("releases", "list", "support", "--json"))
    assert [one["state"] for one in listed] == ["RELEASE_STATE_RETIRED", "RELEASE_STATE_ROLLED_BACK"]
    between = await command("releases", "diff", "support#2", "support#1")
    assert "gate.int8.agreement" in between


async def test_mistakes_are_named(store: str) -> None:
    command = Command(store)
    assert "adapter not found" in await command.fails("releases", "list", "nothing")
    assert "release not found" in await command.fails("releases", "history", "nothing#1")
    assert "is not a name like" in await command.fails("releases", "history", "nothing#x")
