"""`loraplex gateway`: reads the settings and runs the gateway."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

from loraplex.gateway.settings import GatewaySettings
from loraplex.runtime.interpreter import importing, starting
from loraplex.runtime.rpc.settings import read_settings
from loraplex.runtime.telemetry.logging import set_up_logging
from loraplex_client import InvalidRequestError
from loraplex_client.endpoint import CERT_KEY_VARIABLE, CERT_VARIABLE, KEY_FILE_VARIABLE, KEY_VARIABLE


@starting(InvalidRequestError)
def main(argv: Sequence[str]) -> None:
    """Run until a signal stops the gateway."""
    settings = read_settings(GatewaySettings, "gateway", argv, os.environ)
    # The gateway's own credential would be that of every request without one.
    for variable in (KEY_VARIABLE, KEY_FILE_VARIABLE, CERT_VARIABLE, CERT_KEY_VARIABLE):
        os.environ.pop(variable, None)
    set_up_logging("gateway", settings.log_format, settings.log_level)
    with importing():
        from loraplex.gateway.app import run  # seconds of imports, which --help and a wrong flag do not wait for
    uvloop.run(run(settings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
