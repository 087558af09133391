"""Runs a command that dies with its parent: `python die_with_parent.py PARENT_PID COMMAND ...` (Linux).

The parent-death signal survives exec, so nothing outlives a kill -9 of the parent. Setting it between fork and exec
of the parent instead would run Python in the copy of a process whose other threads hold locks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(parent: int, command: list[str]) -> None:
    """Request SIGKILL at the parent's death, hide new files from other users, then execute the command."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # The parent died before the request.
        sys.exit("the parent is gone")
    os.umask(0o077)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
