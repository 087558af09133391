"""Lines typed at a terminal: edited by readline, and kept with those of earlier sessions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from clients.cli.terminal import print_warning

# Maximum number of lines that a session begins with; a file with twice as many is cut to these.
_KEPT = 1000


def state_file(name: str) -> Path:
    """Return the path of a file in the user's folder for state (XDG_STATE_HOME)."""
    home = os.environ.get("XDG_STATE_HOME", "")
    # The specification has relative paths ignored.
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state") / "loraplex" / name


class LineEditor:
    """Asks for lines, and keeps them in `history`, a file that only its owner may read.

    The file has a JSON text in each line, because a pasted line may have several lines itself.
    """

    def __init__(self, history: Path) -> None:
        self._history: Path | None = history
        self._last = ""
        self._add: Callable[[str], object] = lambda line: None
        try:
            import readline
        except ImportError:  # a Python without it reads plain lines
            return
        self._add = readline.add_history
        readline.set_auto_history(False)
        if "libedit" not in (readline.__doc__ or ""):
            # Lines that are pasted together are one line of several, which Enter ends.
            readline.parse_and_bind("set enable-bracketed-paste on")
        for line in self._read(history):
            self._add(line)
            self._last = line

    def ask(self, prompt: str) -> str:
        """Return the next line, which may have several if they were pasted. Raises EOFError, KeyboardInterrupt."""
        line = input(prompt)
        if line.strip() and line != self._last:
            self._add(line)
            self._last = line
            if self._history is not None:
                self._keep(self._history, line)
        return line

    def _read(self, history: Path) -> list[str]:
        try:
            lines = list(_texts(history))
            if len(lines) > 2 * _KEPT:
                part = history.with_suffix(".part")
                part.touch(mode=0o600)
                part.write_text("".join(f"{json.dumps(line)}\n" for line in lines[-_KEPT:]), encoding="utf-8")
                part.replace(history)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(error)
            return []
        return lines[-_KEPT:]

    def _keep(self, history: Path, line: str) -> None:
        try:
            history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(
                os.open(history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        print_warning(f"the history is not kept: {error.filename}: {error.strerror}")
        self._history = None


def _texts(history: Path) -> Iterator[str]:
    """Yield the texts of a file, without lines that are no JSON text: they were written in part."""
    for line in history.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            text = json.loads(line)
        except ValueError:
            continue
        if isinstance(text, str) and "\0" not in text:
            yield text
