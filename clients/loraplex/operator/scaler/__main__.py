"""`loraplex scaler`: reads the settings and runs the scaler."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

from loraplex.operator.scaler.app import run
from loraplex.operator.scaler.settings import ScalerSettings
from loraplex.runtime.interpreter import starting
from loraplex.runtime.rpc.settings import read_settings
from loraplex.runtime.telemetry.logging import set_up_logging
from loraplex_client import InvalidRequestError


@starting(InvalidRequestError)
def main(argv: Sequence[str]) -> None:
    """Run until a signal stops the scaler."""
    settings = read_settings(ScalerSettings, "scaler", argv, os.environ)
    set_up_logging("scaler", settings.log_format, settings.log_level)
    uvloop.run(run(settings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
