"""`loraplex operator`: reads the settings and runs the operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

from loraplex.operator.settings import OperatorSettings
from loraplex.runtime.interpreter import starting
from loraplex.runtime.rpc.settings import read_settings
from loraplex.runtime.telemetry.logging import set_up_logging
from loraplex_client import InvalidRequestError


@starting(InvalidRequestError)
def main(argv: Sequence[str]) -> int:
    """Run until a signal stops the operator; returns 1 when Kubernetes can't be called."""
    settings = read_settings(OperatorSettings, "operator", argv, os.environ)
    set_up_logging("operator", settings.log_format, settings.log_level)
    from loraplex.operator.app import KubernetesGone, run  # kopf, which --help and a wrong flag do not need

    try:
        uvloop.run(run(settings))
    except KubernetesGone as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
