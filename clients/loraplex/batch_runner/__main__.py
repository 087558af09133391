"""`loraplex runner`: reads the settings and runs batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

from loraplex.batch_runner.settings import RunnerSettings
from loraplex.runtime.interpreter import importing, starting
from loraplex.runtime.rpc.settings import read_settings
from loraplex.runtime.telemetry.logging import set_up_logging
from loraplex_client import InvalidRequestError


@starting(InvalidRequestError)
def main(argv: Sequence[str]) -> None:
    """Run until a signal stops the runner."""
    settings = read_settings(RunnerSettings, "runner", argv, os.environ)
    set_up_logging("runner", settings.log_format, settings.log_level)
    with importing():
        from loraplex.batch_runner.app import run  # seconds of imports, which --help and a wrong flag do not wait for
    uvloop.run(run(settings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
