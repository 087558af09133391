"""The example at the beginning of a guide, run as a reader would. Releases, scaling and the tutorial have own tests."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import textwrap
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.conftest import Cluster, running_cluster
from tests.valkey_server import ValkeyServer

ROOT = Path(__file__).parents[2]
# Ends what a reader would end with Ctrl-C.
_END = "kill $(jobs -p) 2> /dev/null || true; wait"
GUIDES = ("adapters", "chat", "loadtest", "quantization", "quotas", "structured-answers", "vectors")

pytestmark = [pytest.mark.nightly, pytest.mark.model]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A worker with the shipped model."""
    async with running_cluster(
        tmp_path_factory.mktemp("guides") / "cluster", str(ROOT / "examples/model"), {}
    ) as running:
        yield running


def example(guide: str, *, starts: bool = False) -> str:
    """Return the first block of a guide, without the lines that start a whole cluster unless it `starts` one."""
    page = (ROOT / "docs/guides" / f"{guide}.md").read_text(encoding="utf-8")
    block = re.search(r"((?:^ {4}.*\n)+)|^```\n([\s\S]*?)^```$", page, re.MULTILINE)
    assert block is not None
    lines = [line.removeprefix("    ") for line in (block[1] or block[2]).splitlines()]
    return "\n".join(line for line in lines if starts or not line.startswith("loraplex up "))


async def run(commands: str, directory: Path, variables: Mapping[str, str]) -> str:
    """Run the commands beside `examples/`; return what they print."""
    (directory / "examples").symlink_to(ROOT / "examples")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{directory}:{environment['PATH']}"
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", f"trap '{_END}' EXIT\n{commands}"),
        cwd=directory,
        env={**environment, **variables},
        stdout=PIPE,
        stderr=STDOUT,
    )
    output = (await shell.communicate())[0].decode()
    assert shell.returncode == 0, f"{commands}\n{output}"
    return output


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_example_of_a_guide(guide: str, cluster: Cluster, tmp_path: Path) -> None:
    addresses = {"LORAPLEX_ADDRESS": cluster.local.router, "LORAPLEX_STORE_ADDRESS": cluster.local.store}
    assert await run(example(guide), tmp_path, addresses)


def drill() -> tuple[str, str]:
    """Return the two blocks of the drill of restoring, by hand."""
    page = (ROOT / "docs/guides/operating.md").read_text(encoding="utf-8").partition("\n## Restore a backup\n")[2]
    first, second = re.findall(r"(?:^ {4}.*\n)+", page, re.MULTILINE)[:2]
    return first, second


async def test_the_cluster_of_the_guide_of_operating_and_its_drill(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory: Callable[[], int]
) -> None:
    """The blocks as they stand; between them waits what a reader's hands take."""
    redis = ValkeyServer(tmp_path_factory.mktemp("r"))
    await redis.start()
    router, store, health = (str(unused_tcp_port_factory()) for _ in range(3))
    used = "until loraplex usage --json | grep -q '\"used\": [1-9]'; do sleep 0.2; done"
    noted = "until [ $(ls backups/removals | wc -l) = 2 ]; do sleep 0.2; done"
    before, after = (textwrap.dedent(block) for block in drill())
    commands = f"{example('operating')}\n{before.replace('loraplex usage', used)}\n{noted}\necho LOST\n{after}\n"
    commands += 'echo RESTORED; loraplex generate "Hello" --max-tokens 300 | cmp - answer.txt'
    commands = commands.replace("redis://127.0.0.1:6379", redis.url)
    commands = commands.replace("50052", store).replace("50054", health)
    ports = {"LORAPLEX_ROUTER_PORT": router, "LORAPLEX_ADAPTER_STORE_PORT": store}
    addresses = {"LORAPLEX_ADDRESS": f"127.0.0.1:{router}", "LORAPLEX_STORE_ADDRESS": f"127.0.0.1:{store}"}
    flush = f"#!{sys.executable}\nimport sys, redis\nredis.from_url(sys.argv[2]).execute_command(*sys.argv[3:])\n"
    (tmp_path / "valkey-cli").write_text(flush)  # which the wheel does not have
    (tmp_path / "valkey-cli").chmod(0o755)
    try:
        output = await run(commands, tmp_path, ports | addresses)
    finally:
        await redis.kill()
    start, restored = output.split("LOST")
    assert re.search(r"(<\d+>){5}", start)
    assert "2 purges and revocations are done again" in restored
    tables = restored.rpartition("copied the catalog")[2].partition("RESTORED")[0].splitlines()
    by_tenant = [line.split("\t") for line in tables if line.startswith(("acme", "globex"))]
    lost = (tmp_path / "keys" / "acme-admin.key").read_text().split("_")[1]
    assert [row[0] for row in by_tenant] == ["acme"] * len(by_tenant) != [], "the tenant that was purged stays away"
    assert re.search(r"\b[1-9]\d* of 2000000\b", restored), "the account is back"
    assert [line.split("\t")[-1] != "-" for line in tables if line.startswith(lost)] == [True], "the key is revoked"


async def test_the_cluster_of_the_guide_of_security(tmp_path: Path, unused_tcp_port: int) -> None:
    ports = f"--http 0 --store-port 0 --port {unused_tcp_port}"
    commands = example("security", starts=True).replace("--http 8443", ports)
    assert "ready router=" in await run(commands, tmp_path, {"LORAPLEX_ADDRESS": f"127.0.0.1:{unused_tcp_port}"})
