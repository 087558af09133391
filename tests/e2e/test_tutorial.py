"""The tutorial's blocks and the README's commands, run in order as a reader would: they print what the page says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.real import is_cached

# The real model on a busy machine. In a fresh clone its engine compiles its kernels first.
pytestmark = [pytest.mark.nightly, pytest.mark.model, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
# A fenced block with its language, or lines that are indented by four.
BLOCKS = re.compile(r"^```(\w+)\n([\s\S]*?)^```$|((?:^ {4}.*\n)+)", re.MULTILINE)
COMMANDS = ("make ", "source ", "python ", "loraplex ", "curl ", "pkill ")


@dataclass(frozen=True)
class Block:
    """A block of the page: `python`, `commands` or `output`."""

    kind: str
    text: str


def blocks() -> list[Block]:
    """Return the blocks in order. Lines that activate the environment are left out."""
    found = []
    for language, fenced, indented in BLOCKS.findall((ROOT / "docs/tutorial.md").read_text(encoding="utf-8")):
        lines = [line[4:] for line in indented.splitlines()]
        if language:
            found.append(Block(language, fenced))
        elif lines[0].startswith(COMMANDS):
            found.append(Block("commands", "\n".join(line for line in lines if not line.startswith("source "))))
        else:
            found.append(Block("output", "\n".join(lines)))
    return found


class Reader:
    """Runs blocks beside a running `loraplex up`."""

    def __init__(self, up: Process, addresses: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.up = up
        self._addresses = addresses
        self._environment = environment

    def own(self, text: str) -> str:
        """Return a block with this cluster's ports, which the system chose."""
        text = text.replace("127.0.0.1:50051", self._addresses["router"])
        return text.replace("127.0.0.1:8000", self._addresses["http"])

    async def start(self, *command: str) -> Process:
        """Start a program as a reader's terminal would."""
        return await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=self._environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
        )

    async def run(self, block: Block) -> str:
        """Run a block; return what it prints."""
        command = (sys.executable, "-c") if block.kind == "python" else ("bash", "-ec")
        process = await self.start(*command, self.own(block.text))
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, f"{block.text}\n{output}"
        return output

    def worker(self) -> int:
        """Return the id of the worker's process."""
        children = Path(f"/proc/{self.up.pid}/task/{self.up.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Reader]:
    """Run the tutorial's first block, with free ports."""
    if not is_cached():
        pytest.skip("the real model is not cached; `make real` fetches it")
    started = blocks()[0].text.splitlines()
    assert started[0] == "make setup"
    assert started[1].endswith(" --http 8000")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    command = started[1].replace("--http 8000", "--http 0 --port 0 --store-port 0").split()
    up = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=PIPE, stderr=STDOUT)
    assert up.stdout is not None
    try:
        line = ""
        while not line.startswith("ready "):
            line = (await up.stdout.readline()).decode()
            assert line, "loraplex up has ended"
        addresses = dict(word.split("=") for word in line.split()[1:])
        shown = {"LORAPLEX_ADDRESS": addresses["router"], "LORAPLEX_STORE_ADDRESS": addresses["store"]}
        yield Reader(up, addresses, environment | shown)
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGINT)
        await up.communicate()
    assert up.returncode == 0


async def test_the_blocks_of_the_tutorial(reader: Reader) -> None:
    """The last one has a test of its own."""
    start, ready, *others = blocks()[:-1]
    assert (start.kind, ready.text.split("=")[0]) == ("commands", "ready router")
    printed = ""
    for block in others:
        if block.kind == "output":
            assert block.text in printed
        else:
            printed = await reader.run(block)
            assert printed.strip()


async def test_the_commands_of_the_readme(reader: Reader) -> None:
    (commands,) = re.findall(r"^```\n(loraplex generate [\s\S]*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE)
    await reader.run(Block("commands", commands.replace("--duration 20", "--duration 3")))


# Other tests kill workers of models that start sooner.
async def test_the_block_that_kills_a_worker(reader: Reader) -> None:
    last = blocks()[-1]
    assert last.text.splitlines()[1] == 'pkill -9 -f "loraplex worker"'
    # Shorter answers than the page's, because the tests beside this one leave the model little of the processor.
    loadtest = last.text.splitlines()[0].replace("--duration 30", "--duration 3")
    loadtest = loadtest.replace("--answer-tokens 200", "--answer-tokens 40")
    load = await reader.start("bash", "-ec", loadtest)
    while not await running_rows(reader):
        pass  # each look is a command that takes its time
    os.kill(reader.worker(), signal.SIGKILL)
    assert reader.up.stdout is not None
    while "worker-1 was killed by SIGKILL; starting another" not in (await reader.up.stdout.readline()).decode():
        assert reader.up.returncode is None
    report = (await load.communicate())[0].decode()
    assert load.returncode == 0, report
    assert re.search(r"\b0 errors", report), report


async def running_rows(reader: Reader) -> int:
    """Return how many rows the workers run."""
    listed = json.loads(await reader.run(Block("commands", "loraplex workers --json")))
    return sum(worker["rows_running"] for worker in listed)
