"""The drill of docs/guides/operating.md on Kubernetes, with the chart's pods as processes: two disks are lost."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.kubernetes_tools import ROOT, Manifest, needs_helm, render
from tests.deploy.pods import Cluster
from tests.deploy.rehearsal import Streams

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

_VALUES = ("backup.schedule=@daily", "backup.claim=backups")


def drill() -> list[str]:
    """Return the lines of the page's block."""
    page = (ROOT / "docs/guides/operating.md").read_text(encoding="utf-8").partition("\n## Restore a backup\n")[2]
    (block,) = re.findall(r"(?:^ {4}(?:kubectl|helm) .*\n)+", page, re.MULTILINE)
    return [line.strip() for line in block.splitlines()]


class Operator:
    """Does what each line of the page does, to pods that are processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.cluster = Cluster(directory)
        self.copy = ""

    async def loraplex(self, *words: str) -> str:
        """Run the command beside the cluster; return what it prints."""
        servers = ["--store", f"{self.cluster.address_of('lx-store')}:50052"]
        if "purge" in words:
            servers += ["--router", self.cluster.routers.partition(",")[0]]
        command = [sys.executable, "-m", "loraplex", *words, *servers]
        done = await asyncio.to_thread(subprocess.run, command, cwd=self._directory, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    async def do(self, line: str) -> None:
        """Do what a line says."""
        _, *words = line.split()
        claims = self._directory / "claims"
        match words:
            case ["create", "job", name, source]:
                assert source == "--from=cronjob/llm-backup"
                (cron,) = [one for one in render("laptop", _VALUES) if one["kind"] == "CronJob"]
                job: Manifest = {"kind": "Job", "metadata": {"name": name}, "spec": cron["spec"]["jobTemplate"]["spec"]}
                job["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"  # as the pods of this machine end
                await self.cluster.apply([*render("laptop", _VALUES), job])
            case ["wait", "--for=condition=complete", _]:
                pass  # `apply` has waited
            case ["exec", "llm-store-0", "--", "ls", "/var/lib/backups"]:
                (self.copy,) = [path.name for path in (claims / "backups").iterdir() if path.name.endswith("Z")]
            case ["upgrade", "llm", "deploy/chart", "-f", "values.yaml", "--set", value]:
                restore = re.sub(r"=[\dTZ-]+$", f"={self.copy}", value)
                await self.cluster.apply(render("laptop", (*_VALUES, restore)))
            case ["delete", "statefulset", *names]:
                for name in names:
                    await self.cluster.scale(name.replace("llm", "lx"), 0)
            case ["delete", "pvc", *names]:
                for name in names:
                    shutil.rmtree(claims / name.replace("llm", "lx"))
            case _:
                raise AssertionError(f"a line that the test does not know: {line}")


async def test_the_drill_of_the_page_under_streams(tmp_path: Path) -> None:
    needs_helm()
    operator = Operator(tmp_path)
    loraplex, cluster = operator.loraplex, operator.cluster
    lines = drill()
    try:
        await cluster.apply(render("laptop", _VALUES))
        load = Streams(cluster.routers, 4)
        await loraplex("tenants", "create", "globex")
        await loraplex("plans", "set", "tenants/acme", "tokens_per_month=90000000")
        await loraplex("keys", "create", "--tenant", "acme", "--out", "lost.key")
        while "\t0 of 90000000" in (await loraplex("usage")):
            pass  # each look is a command that takes its time
        for line in lines[:3]:
            await load.during(operator.do(line))
        lost = (tmp_path / "lost.key").read_text().split("_")[1]
        await loraplex("keys", "revoke", lost)
        await loraplex("tenants", "purge", "globex", "--yes")
        notes = tmp_path / "claims" / "backups" / "removals"
        async with asyncio.timeout(60):
            while len([path for path in notes.iterdir() if not path.name.startswith(".")]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # the store writes them each second
        await load.end()  # without Redis new calls end after 15 s
        running = Streams(cluster.routers, 0, 4_000)
        answers = [asyncio.create_task(running.ask(f"stream {number}")) for number in range(4)]
        for line in lines[3:]:
            await operator.do(line)
        await asyncio.gather(*answers)
        await running.end()
        after = Streams(cluster.routers, 0)
        await after.ask("another")
        await after.end()
        (key,) = [line.split("\t") for line in (await loraplex("keys", "list")).splitlines() if line.startswith(lost)]
        assert key[-1] != "-", "the key is revoked"
        assert "globex" not in await loraplex("tenants", "list")
        assert re.search(r"\t[1-9]\d* of 90000000", await loraplex("usage")), "the account is back"
        assert {code for _, code in cluster.ended} == {0}
    finally:
        await cluster.close()
