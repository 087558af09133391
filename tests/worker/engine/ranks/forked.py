"""Ranks as forks of the test's own process: torch is imported once, and compiled kernels are there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import traceback

import pytest


class ForkedRank:
    """A child process, as subprocess.Popen has it."""

    def __init__(self, sock: socket.socket) -> None:
        """Fork; the child runs a rank at this socket."""
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            # Its own end alone: those of the parent would keep the sockets open when the parent closes them.
            _close_others(sock.fileno())
            from loraplex.worker.engine.process import run_rank

            code = run_rank(sock)
        except BaseException:  # the child must not run the parent's tests
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self, timeout: float | None = None) -> int:
        """See subprocess.Popen."""
        give_up_at = time.monotonic() + (timeout or 1e9)
        while time.monotonic() < give_up_at:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("a rank", timeout or 0)

    def kill(self) -> None:
        """See subprocess.Popen."""
        os.kill(self.pid, signal.SIGKILL)


def _close_others(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if descriptor > 2 and descriptor != kept and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.close(descriptor)
        except OSError:  # that of the listing
            continue


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines fork their ranks."""
    monkeypatch.setattr("loraplex.worker.engine.ranks.start_process", ForkedRank)
