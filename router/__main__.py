"""`python -m router`: reads the settings and runs the router."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import uvloop

from broker.connection import RedisUnreachableError
from router.dispatch.relay import AdvertisedAddressError
from router.settings import Settings
from rpc.children.process import LaunchError
from rpc.server import PortInUse
from rpc.settings import SettingsError, read_settings
from telemetry.logging import set_up_logging
from telemetry.metrics import MetricsPortError
from tenancy.audit_log import AuditFileError

# Number of new objects after which Python looks for garbage among them, and of such looks until one among older ones.
# A call makes hundreds of objects that live as long as it does: by default the looks took an eighth of a burst's time.
_COLLECTIONS = (20_000, 20, 20)
# Interval in seconds after which a thread that reads a large format gives way to the event loop; Python's own is 5 ms,
# which each turn of the loop would wait.
_SWITCH_S = 2e-4
# Errors that waiting cannot fix: the message says in one line what to do.
STOPPING = (
    SettingsError,
    AuditFileError,
    PortInUse,
    MetricsPortError,
    RedisUnreachableError,
    AdvertisedAddressError,
    LaunchError,
)


def main(argv: Sequence[str], process: int = 0) -> int:
    """Run until a signal stops the router; return 2 when it can't start.

    `process` is its number where it is one of several processes, which a supervisor has started (router.processes).
    """
    try:
        os.umask(0o077)  # what it writes is for its own user
        settings = read_settings(Settings, "router", argv, os.environ)
        set_up_logging(f"router-{process}" if process else "router", settings.log_format, settings.log_level)
        if settings.processes > 1 and not process:
            from router.processes import supervise

            return uvloop.run(supervise(settings, argv))
        gc.disable()  # the imported modules stay: looking for garbage among them takes a tenth of the start
        from router.app import run

        gc.freeze()
        gc.enable()
        gc.set_threshold(*_COLLECTIONS)
        sys.setswitchinterval(_SWITCH_S)
        uvloop.run(run(settings.of_process(process), supervised=True) if process else run(settings))
    except STOPPING as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
