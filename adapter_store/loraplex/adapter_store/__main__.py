"""`loraplex store`: read the settings, run the store. Exits with 2 and one line when it cannot start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

from loraplex.adapter_store.app import BootstrapKeyError, StoreSettings, serve
from loraplex.adapter_store.signers import SignersError
from loraplex.adapter_store.storage import DataDirectoryError
from loraplex.adapter_store.webhooks import WebhooksError
from loraplex.runtime.rpc.server import PortInUse
from loraplex.runtime.rpc.settings import SettingsError, read_settings
from loraplex.runtime.telemetry.logging import set_up_logging
from loraplex.runtime.telemetry.metrics import MetricsPortError
from loraplex.runtime.tenancy.audit_log import AuditFileError

# Errors that waiting cannot fix: the message says in one line what to do.
STOPPING = (
    SettingsError,
    BootstrapKeyError,
    DataDirectoryError,
    AuditFileError,
    SignersError,
    WebhooksError,
    MetricsPortError,
    PortInUse,
)


def main(argv: Sequence[str]) -> int:
    """Run the process; returns its exit status."""
    try:
        os.umask(0o077)  # what it writes is for its own user
        settings = read_settings(StoreSettings, "adapter-store", argv, os.environ)
        set_up_logging("adapter_store", settings.log_format, settings.log_level)
        uvloop.run(serve(settings))
    except STOPPING as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
