"""`loraplex plan` in the test's own process: one of its own takes a second to start."""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from loraplex.worker.__main__ import main


@dataclass(frozen=True)
class Ended:
    """The exit code of a command and what it printed."""

    returncode: int | str | None
    stdout: str
    stderr: str


def run(*words: str) -> Ended:
    """Run the command to its end."""
    out, err, umask = StringIO(), StringIO(), os.umask(0o077)
    os.umask(umask)
    with redirect_stdout(out), redirect_stderr(err):
        code: int | str | None
        try:
            code = main(["plan", *words])
        except SystemExit as ended:
            code = ended.code
        finally:
            os.umask(umask)
    return Ended(code, out.getvalue(), err.getvalue())
