"""`loraplex scaler`, or `python -m clients.scaler`: reads the settings and runs the scaler."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop
from loraplex_client import InvalidRequestError

from clients.scaler.app import run
from clients.scaler.settings import ScalerSettings
from rpc.server import PortInUse
from rpc.settings import SettingsError, read_settings
from telemetry.logging import set_up_logging
from telemetry.metrics import MetricsPortError


def main(argv: Sequence[str], command: str = "python -m clients.scaler") -> int:
    """Run until a signal stops the scaler; returns 2 when it can't start."""
    try:
        settings = read_settings(ScalerSettings, "scaler", argv, os.environ, command=command)
        set_up_logging("scaler", settings.log_format, settings.log_level)
        uvloop.run(run(settings))
    except (SettingsError, PortInUse, MetricsPortError, InvalidRequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
