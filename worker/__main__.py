"""`python -m worker`: reads the settings and runs the I/O process, which starts the engine's."""

from __future__ import annotations

import os
import sys

import uvloop

from artifacts.errors import ArtifactError
from broker.connection import RedisUnreachableError
from rpc.settings import SettingsError, read_settings
from telemetry.logging import set_up_logging
from worker.app import run
from worker.settings import Settings
from worker.supervisor import EngineUnusableError


def main() -> int:
    """Run until told to stop; 2 when it can't start."""
    set_up_logging("worker")
    try:
        settings = read_settings(Settings, "worker", sys.argv[1:], os.environ)
        uvloop.run(run(settings))
    except (SettingsError, ArtifactError, RedisUnreachableError, EngineUnusableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
