"""The launcher's child processes: ready lines, reasons of failure, stopping."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from loraplex.runtime.rpc.children.process import Process

READY_THEN_WAIT = "import signal; print('noise\\nready thing=1.2.3.4:5 other=x', flush=True); signal.pause()"


async def start(code: str, directory: Path, name: str = "thing") -> Process:
    """A Python child that runs `code`."""
    return await Process.start(name, [sys.executable, "-c", code], log_path=directory / f"{name}.log")


async def test_reads_the_ready_line(tmp_path: Path) -> None:
    process = await start(READY_THEN_WAIT, tmp_path)
    assert await process.wait_ready() == {"thing": "1.2.3.4:5", "other": "x"}
    await process.stop(grace_s=10)
    assert process.exited.result() == -signal.SIGTERM
    assert "ready thing=1.2.3.4:5" in (tmp_path / "thing.log").read_text()


async def test_leads_a_session_of_its_own_under_the_pid_that_was_started(tmp_path: Path) -> None:
    process = await start("import os, time; print('ready pid=%d' % os.getpid(), flush=True); time.sleep(60)", tmp_path)
    assert await process.wait_ready() == {"pid": str(process.pid)}
    assert os.getsid(process.pid) == process.pid
    await process.kill()


def test_its_files_are_its_user_s_own_on_every_event_loop(tmp_path: Path) -> None:
    """uvloop, on which chaos runs, starts no process with a umask."""

    async def write(name: str) -> int:
        process = await start(f"open({str(tmp_path / name)!r}, 'w')", tmp_path)
        await process.exited
        await process.kill()
        return (tmp_path / name).stat().st_mode & 0o777

    assert (asyncio.run(write("a")), uvloop.run(write("b"))) == (0o600, 0o600)


async def test_quotes_the_error_line_of_a_refusal(tmp_path: Path) -> None:
    code = "import sys; print('noise\\nerror: no such model: x\\n', file=sys.stderr); sys.exit(2)"
    process = await start(code, tmp_path)
    await process.exited
    assert str(process.failure()) == "thing: no such model: x"
    await process.kill()


async def test_says_how_it_ended_without_an_error_line(tmp_path: Path) -> None:
    crashed = await start("raise RuntimeError('broken')", tmp_path, "crashed")
    killed = await start(READY_THEN_WAIT, tmp_path, "killed")
    silent = await start("raise SystemExit(3)", tmp_path, "silent")
    killed.send_signal(signal.SIGKILL)
    await asyncio.wait({process.exited for process in (crashed, killed, silent)})
    assert str(crashed.failure()) == "crashed exited with status 1: RuntimeError: broken"
    assert str(killed.failure()).startswith("killed was killed by SIGKILL")
    assert str(silent.failure()) == "silent exited with status 3"
    for process in (crashed, killed, silent):
        await process.kill()


async def test_kills_what_does_not_stop_and_its_children(tmp_path: Path, leftovers: Callable[[], list[str]]) -> None:
    code = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("ready", "child=1", flush=True)
while True: signal.pause()
"""
    process = await start(code, tmp_path)
    await process.wait_ready()
    await process.stop(grace_s=0.1)
    assert process.exited.result() == -signal.SIGKILL
    assert leftovers() == []


async def test_ends_while_a_grandchild_holds_its_output(tmp_path: Path, leftovers: Callable[[], list[str]]) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
    process = await start(code, tmp_path)
    assert await asyncio.wait_for(asyncio.shield(process.exited), 60) == 0
    await process.kill()
    assert leftovers() == []


async def test_a_long_output_without_lines_does_not_block_it(tmp_path: Path) -> None:
    process = await start("print('x' * 5_000_000); print('ready a=b', flush=True)", tmp_path)
    assert await process.wait_ready() == {"a": "b"}
    assert await asyncio.shield(process.exited) == 0
    await process.kill()
