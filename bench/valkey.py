"""A Valkey of a benchmark's own."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.cli import valkey


@contextmanager
def running_valkey() -> Iterator[str]:
    """Run a server; yields its URL. Raises RuntimeError if it ends before it is ready."""
    with tempfile.TemporaryDirectory(prefix="lp-") as name:
        directory = Path(name)
        server = subprocess.Popen(valkey.command(directory), stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            if not any(valkey.READY.search(line) for line in server.stdout):
                raise RuntimeError("Valkey ended before it was ready")
            yield valkey.socket_url(directory)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
            server.stdout.close()
