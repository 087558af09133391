"""`make evaluate`: compares tools of others, each in an environment of its own, with our figures."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.real import Unavailable
from tests.trials.evaluate import harness, testers
from tests.trials.libraries.environments import InstallError, install
from tests.trials.libraries.library import ROOT

DIRECTORY = ROOT / ".cache/evaluate"


@dataclass(frozen=True)
class Tool:
    """A tool: its packages with versions, itself first, and what prints its comparison and tells whether both agree.

    That takes the interpreter of the tool's environment, a directory for its files, and the number of questions.
    """

    packages: Sequence[str]
    compare: Callable[[str, Path, int], Awaitable[bool]]


TOOLS = {
    "lm_eval": Tool(harness.PACKAGES, harness.compare),
    "guidellm": Tool(testers.GUIDELLM, testers.compare_guidellm),
    "locust": Tool(testers.LOCUST, testers.compare_locust),
}


async def main(names: Sequence[str], questions: int) -> int:
    """Compare the tools of these names, or all; return 1 if one of them disagrees."""
    status = 0
    for name in names or TOOLS:
        tool = TOOLS[name]
        print(f"\n{tool.packages[0]}", flush=True)
        try:
            interpreter = await asyncio.to_thread(install, DIRECTORY / name, tool.packages)
            directory = DIRECTORY / f"{name}-work"
            directory.mkdir(exist_ok=True)
            if not await tool.compare(interpreter, directory, questions):
                print(f"{name} disagrees; its files are in {directory.relative_to(ROOT)}")
                status = 1
        except Unavailable as error:
            print(f"skipped: {error}")
        except InstallError as error:
            is_lacking = "Could not find a version" in str(error)
            print("skipped: the package index lacks it" if is_lacking else f"skipped: {error}")
            status = status if is_lacking or error.unreachable else 1
    return status


def _names(text: str) -> list[str]:
    """Return the names of tools, which commas separate."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in TOOLS:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(TOOLS)}")
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.trials.evaluate", description=__doc__)
    parser.add_argument("--only", type=_names, default=[], metavar="NAME,NAME", help="these tools alone")
    parser.add_argument("--questions", type=int, default=40, help="number of questions of each of lm_eval's tasks")
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.only, arguments.questions)))
