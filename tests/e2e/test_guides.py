"""The example at the beginning of a guide, run as a reader would. Releases, scaling and the tutorial have own tests."""

from __future__ import annotations

import asyncio
import os
import re
import sys
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
GUIDES = ("adapters", "chat", "encoders", "limits", "loadtest", "quantization", "quotas", "structured-answers")

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
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
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


async def test_the_processes_of_the_guide_of_operating(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory: Callable[[], int]
) -> None:
    redis = ValkeyServer(tmp_path_factory.mktemp("r"))
    await redis.start()
    router, store, health = (str(unused_tcp_port_factory()) for _ in range(3))
    commands = example("operating").replace("redis://127.0.0.1:6379", redis.url)
    commands = commands.replace("50052", store).replace("50054", health)
    ports = {"LORAPLEX_ROUTER_PORT": router, "LORAPLEX_ADAPTER_STORE_PORT": store}
    addresses = {"LORAPLEX_ADDRESS": f"127.0.0.1:{router}", "LORAPLEX_STORE_ADDRESS": f"127.0.0.1:{store}"}
    try:
        assert re.search(r"(<\d+>){5}", await run(commands, tmp_path, ports | addresses))
    finally:
        await redis.kill()


async def test_the_cluster_of_the_guide_of_security(tmp_path: Path, unused_tcp_port: int) -> None:
    ports = f"--http 0 --store-port 0 --port {unused_tcp_port}"
    commands = example("security", starts=True).replace("--http 8443", ports)
    assert "ready router=" in await run(commands, tmp_path, {"LORAPLEX_ADDRESS": f"127.0.0.1:{unused_tcp_port}"})
