"""`loraplex operator`, or `python -m clients.operator`: reads the settings and runs the operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop
from loraplex_client import InvalidRequestError

from clients.operator.settings import OperatorSettings
from rpc.settings import SettingsError, read_settings
from telemetry.logging import set_up_logging
from telemetry.metrics import MetricsPortError


def main(argv: Sequence[str], command: str = "python -m clients.operator") -> int:
    """Run until a signal stops the operator; returns 2 when it can't start, 1 when Kubernetes can't be called."""
    try:
        settings = read_settings(OperatorSettings, "operator", argv, os.environ, command=command)
        set_up_logging("operator", settings.log_format, settings.log_level)
        # Imported late: it needs kopf, which the settings have looked for.
        from clients.operator.app import KubernetesGone, run

        try:
            uvloop.run(run(settings))
        except KubernetesGone as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    except (SettingsError, MetricsPortError, InvalidRequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
