"""Commands that compute with a model: a worker process does it, since only workers have torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from clients.cli.terminal import CommandError

_PREFIX = "error: "


def ask_worker(command: str, **flags: str) -> Any:
    """Run `python -m worker COMMAND --flag=value ...` and return the JSON that it prints. Raises CommandError."""
    words = [f"--{name}={value}" for name, value in flags.items()]
    # -P: a folder of the working directory called worker would be run instead.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "worker", command, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        told = next((line for line in reversed(lines) if line.startswith(_PREFIX)), "")
        message = told.removeprefix(_PREFIX) or f"the computation ended with exit status {done.returncode}: {lines[-1]}"
        raise CommandError(message, 2 if told else 1)
    return json.loads(done.stdout)
