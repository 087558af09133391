"""`loraplex scaler`, or `loraplex scaler`: reads the settings and runs the scaler."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

from loraplex.operator.scaler.app import run
from loraplex.operator.scaler.settings import ScalerSettings
from loraplex.runtime.rpc.server import PortInUse
from loraplex.runtime.rpc.settings import SettingsError, read_settings
from loraplex.runtime.telemetry.logging import set_up_logging
from loraplex.runtime.telemetry.metrics import MetricsPortError
from loraplex_client import InvalidRequestError


def main(argv: Sequence[str]) -> int:
    """Run until a signal stops the scaler; returns 2 when it can't start."""
    try:
        settings = read_settings(ScalerSettings, "scaler", argv, os.environ)
        set_up_logging("scaler", settings.log_format, settings.log_level)
        uvloop.run(run(settings))
    except (SettingsError, PortInUse, MetricsPortError, InvalidRequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
