"""`loraplex gateway`: reads the settings and runs the gateway."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

from loraplex.gateway.settings import GatewaySettings
from loraplex.runtime.interpreter import importing
from loraplex.runtime.rpc.server import PortInUse
from loraplex.runtime.rpc.settings import SettingsError, read_settings
from loraplex.runtime.telemetry.logging import set_up_logging
from loraplex.runtime.telemetry.metrics import MetricsPortError
from loraplex_client import InvalidRequestError
from loraplex_client.endpoint import CERT_KEY_VARIABLE, CERT_VARIABLE, KEY_FILE_VARIABLE, KEY_VARIABLE


def main(argv: Sequence[str]) -> int:
    """Run until a signal stops the gateway; returns 2 when it can't start."""
    try:
        settings = read_settings(GatewaySettings, "gateway", argv, os.environ)
        os.umask(0o077)  # what it writes is for its own user
        # The gateway's own credential would be that of every request without one.
        for variable in (KEY_VARIABLE, KEY_FILE_VARIABLE, CERT_VARIABLE, CERT_KEY_VARIABLE):
            os.environ.pop(variable, None)
        set_up_logging("gateway", settings.log_format, settings.log_level)
        with importing():
            from loraplex.gateway.app import run  # seconds of imports, which --help and a wrong flag do not wait for
        uvloop.run(run(settings))
    except (SettingsError, PortInUse, MetricsPortError, InvalidRequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
