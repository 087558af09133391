"""Runs a worker: `python -m worker` (the I/O process, which starts the engine process). `plan`, `quantize`,
`report` and `certify` after it compute and end.
"""

from __future__ import annotations

import gc
import os
import sys

from artifacts import ArtifactError
from rpc.settings import SettingsError, read_settings
from worker import plan
from worker.quantization import evaluate, quantize

# Interval in seconds after which a thread that reads a large job gives way to the event loop; Python's own is 5 ms,
# which each turn of the loop would wait.
_SWITCH_S = 2e-4


def main() -> int:
    """Run until told to stop; 2 when it can't start."""
    os.umask(0o077)  # what it writes is for its own user
    try:
        if sys.argv[1:2] == ["plan"]:
            return _plan(sys.argv[2:])
        if sys.argv[1:2] == ["quantize"]:
            return quantize(sys.argv[2:])
        if sys.argv[1:2] in (["report"], ["certify"]):
            return evaluate(sys.argv[1], sys.argv[2:])
        return _work(sys.argv[1:])
    except (SettingsError, ArtifactError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _work(argv: list[str]) -> int:
    gc.disable()  # the imported modules stay: looking for garbage among them takes a tenth of the start
    import uvloop

    from broker.connection import RedisUnreachableError
    from rpc.server import PortInUse
    from telemetry.logging import environment_of, set_up_logging
    from telemetry.metrics import MetricsPortError
    from tenancy.audit_log import AuditFileError
    from worker.io.app import run
    from worker.io.engine_client import EngineUnusableError
    from worker.io.settings import Settings

    gc.freeze()
    gc.enable()
    settings = read_settings(Settings, "worker", argv, os.environ)
    set_up_logging("worker", settings.log_format, settings.log_level)
    os.environ.update(environment_of(settings.log_format, settings.log_level))  # for the engine process
    sys.setswitchinterval(_SWITCH_S)
    try:
        uvloop.run(run(settings))
    except (AuditFileError, PortInUse, MetricsPortError, RedisUnreachableError, EngineUnusableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(argv: list[str]) -> int:
    as_json = "--json" in argv
    settings = read_settings(plan.PlanSettings, "worker-plan", [word for word in argv if word != "--json"], {})
    try:
        result = plan.plan(settings)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    print(plan.as_json(result) if as_json else plan.as_lines(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
