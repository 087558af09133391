"""The examples of the README's quick start, with the addresses and the adapter of this cluster."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from loraplex_client.generation import FinishReason
from tests.e2e.conftest import TENANT, Cluster

pytestmark = pytest.mark.asyncio(loop_scope="package")
README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")


def example(title: str, language: str, cluster: Cluster) -> str:
    """Return the only example of a language in the README's section of this title."""
    section = README.split(f"\n## {title}\n")[1].split("\n## ")[0]
    (code,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    here = {"127.0.0.1:8000": cluster.local.http, "127.0.0.1:50051": cluster.local.router}
    here |= {'"extract"': '"a"', '"sentiment"': '"a"', "initech": TENANT}
    for documented, own in here.items():
        code = code.replace(documented, own)
    return str(code)


async def output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl(cluster: Cluster) -> None:
    answer = json.loads(await output("sh", "-c", example("Over HTTP", "sh", cluster)))
    assert answer["usage"]["completion_tokens"] == 40


async def test_openai(cluster: Cluster) -> None:
    assert (await output(sys.executable, "-c", example("Over HTTP", "python", cluster))).count("<") > 30


async def test_sdk(cluster: Cluster) -> None:
    said = await output(sys.executable, "-c", example("From Python", "python", cluster))
    assert said.count("<") > 60
    assert f" {FinishReason.LENGTH} 40\n" in said
