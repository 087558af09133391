"""`loraplex chat` at a pseudo-terminal: turns, commands, Ctrl-C, pasted lines, history, rendered Markdown."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2 as pb

from loraplex.cli.chat import Conversation, LineEditor
from loraplex.cli.terminal import CommandError
from loraplex.runtime.rpc import errors
from loraplex_client import AsyncClient
from tests.clients.test_chat import events, saying

HANG = "hang"
# A control sequence, a character that moves the cursor, or any other character.
OUTPUT = re.compile(r"\x1b\[(?P<arguments>[0-?]*)[ -/]*(?P<final>[@-~])|(?P<character>[\s\S])")
BRACKETED = re.compile(r"\x1b\[\?2004[hl]\r?")
PASTE_BEGIN, PASTE_END, UP = "\x1b[200~", "\x1b[201~", "\x1b[A"


def screen(output: str) -> str:
    """Return what a terminal of any height shows after this output."""
    lines, row, column = [""], 0, 0
    for found in OUTPUT.finditer(output):
        character, count = found["character"], int(found["arguments"] or 1) if found["final"] in ("A", "K") else 0
        if found["final"] == "A":
            row = max(0, row - count)
        elif found["final"] == "K":  # the whole line, or from the cursor on
            lines[row] = "" if count == 2 else lines[row][:column]
        elif character == "\n":
            row += 1
            lines += [""] * (row >= len(lines))
        elif character == "\r":
            column = 0
        elif character is not None and character.isprintable():
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines)


class Chat:
    """A running `loraplex chat`, and the terminal that it is at."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, words: str) -> str:
        """Return the output up to these words, which come next; without the switches of bracketed paste."""
        while words not in self._shown:
            self._shown = BRACKETED.sub("", self._shown + os.read(self._terminal, 4096).decode(errors="replace"))
        before, _, self._shown = self._shown.partition(words)
        return before + words


@contextmanager
def chat(address: str, state: Path, term: str, *flags: str) -> Iterator[Chat]:
    """Run a chat at a terminal of this kind."""
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    environ |= {"TERM": term, "XDG_STATE_HOME": str(state), "COLUMNS": "60", "LINES": "20"}
    command = [sys.executable, "-m", "loraplex.cli", "chat", "--router", address, *flags]
    try:
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as process:
            os.close(theirs)
            try:
                yield Chat(process, ours)
                os.write(ours, b"\x04")
                assert process.wait(60) == 0
            finally:
                process.kill()
    finally:
        os.close(ours)


def interrupt_a_thread(pid: int) -> None:
    """Send SIGINT to a thread that is not the main one, as the kernel may on Ctrl-C, where it can be chosen."""
    others = [int(thread.name) for thread in Path(f"/proc/{pid}/task").glob("*") if int(thread.name) != pid]
    numbers = {"x86_64": 234, "aarch64": 131}  # of the call tgkill
    if not others or (number := numbers.get(os.uname().machine)) is None:
        os.kill(pid, signal.SIGINT)
        return
    assert ctypes.CDLL(None, use_errno=True).syscall(number, pid, others[0], int(signal.SIGINT)) == 0


def turns(server: Any) -> list[Any]:
    return [request.spec for request in server.service.requests if isinstance(request, pb.GenerateRequest)]


def test_a_conversation(server: Any, tmp_path: Path) -> None:
    hung = [*events(pb.Delta(text="Once upon"))[:1], HANG]
    full = errors.InvalidField("chat", "900 prompt tokens do not fit", reason="CONTEXT_EXCEEDED")
    server.service.scripts = [hung, saying("Fine."), [errors.NotFound("adapter", "gone")], saying("Ahoy!"), [full]]
    with chat(server.address, tmp_path, "dumb") as here:
        here.until("> ")
        here.type("Tell me\n")
        here.until("Once upon")
        interrupt_a_thread(here.process.pid)  # Ctrl-C stops the answer
        here.until("> ")
        here.type("How are you?\n")
        here.until("Fine.")
        here.until("> ")
        server.service.unary_failure = errors.NotFound("adapter", "nope")
        here.type("/adapter nope\n")
        here.until("error: adapter not found: nope")
        here.until("\n> ")
        server.service.unary_failure = None
        here.type("/adapter gone\n")
        here.until("gone> ")
        here.type("Hm?\n")
        here.until("error: adapter not found: gone")
        here.until("gone> ")
        here.type("/system Be a pirate.\n")
        here.until("> ")
        here.type("/wrong\n")
        here.until("not a command")
        here.type("/adapter\nHey\n")
        here.until("Ahoy!")
        here.until("> ")
        here.type("More\n")
        here.until("do not fit; /new begins")
        here.until("> ")
    chats = [[(m.role, m.content) for m in spec.chat.messages] for spec in turns(server)]
    assert chats[1] == [("user", "Tell me"), ("assistant", "Once upon"), ("user", "How are you?")]
    assert chats[2][-1] == ("user", "Hm?")
    assert chats[3] == [("system", "Be a pirate."), ("user", "Hey")]
    assert [spec.adapter for spec in turns(server)] == ["", "", "gone", "", ""]


ANSWER = """# Plan

Two lines
that stay

- one
- <b>two</b> [here](http://x/)

[1]: http://y/

```python
print(1)
```
"""


def test_pasted_lines_history_and_markdown(server: Any, tmp_path: Path) -> None:
    history = tmp_path / "loraplex" / "chat_history"
    history.parent.mkdir()
    history.write_text(json.dumps("Earlier") + "\n{cut off\n", encoding="utf-8")
    history.chmod(0o600)
    parts = [pb.Delta(reasoning="Hm.")] + [pb.Delta(text=ANSWER[at : at + 7]) for at in range(0, len(ANSWER), 7)]
    server.service.scripts = [saying("Yes."), events(*parts, reason=pb.FINISH_REASON_LENGTH)]
    with chat(server.address, tmp_path, "xterm") as here:
        here.until("> ")
        here.type(f"{UP}\r")
        here.until("Yes.")
        here.until("\n> ")
        here.type(f"{PASTE_BEGIN}one\rtwo{PASTE_END}")
        here.until("two")
        here.type("\r")
        shown = screen(here.until("--max-tokens"))
        here.until("\n> ")  # Ctrl-D before the prompt would not reach readline.
    assert [spec.chat.messages[-1].content for spec in turns(server)] == ["Earlier", "one\ntwo"]
    assert shown.splitlines()[:-1] == [
        "one", "two", "Hm.", "", "Plan".center(60).rstrip(), "", "Two lines", "that stay", "",
        " • one", " • <b>two</b> here (http://x/)", "", "[1]: http://y/", "", " print(1)",
    ]  # fmt: skip
    assert [json.loads(line) for line in history.read_text().splitlines() if line[0] == '"'] == ["Earlier", "one\ntwo"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_no_conversation_begins_without_a_router() -> None:
    async def connect() -> AsyncClient:
        return AsyncClient("127.0.0.1:1")

    with asyncio.Runner() as runner, pytest.raises(CommandError, match="no router answers"):
        Conversation(runner, runner.run(connect()), "127.0.0.1:1", {"model": None}).talk()


def test_a_history_that_cannot_be_written_is_kept_for_the_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    readline = pytest.importorskip("readline")
    before = readline.get_current_history_length()
    (tmp_path / "file").touch()
    editor = LineEditor(tmp_path / "file" / "history")
    for line in ("one", "two", "two", " "):
        monkeypatch.setattr("builtins.input", lambda _, line=line: line)
        assert editor.ask("> ") == line
    assert readline.get_current_history_length() == before + 2
    assert capsys.readouterr().err.count("the history is not kept: ") == 1
