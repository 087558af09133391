"""`python -m adapter_store`: read the settings, run the store. Exits with 2 and one line when it cannot start."""

from __future__ import annotations

import os
import sys

import uvloop

from adapter_store.app import BootstrapKeyError, StoreSettings, serve
from adapter_store.signers import SignersError
from adapter_store.sources.policy import SourcesError
from adapter_store.storage import DataDirectoryError
from adapter_store.webhooks import WebhooksError
from rpc.server import PortInUse
from rpc.settings import SettingsError, read_settings
from telemetry.logging import set_up_logging
from telemetry.metrics import MetricsPortError
from tenancy.audit_log import AuditFileError
from tenancy.plans import PlansError

# Errors that waiting cannot fix: the message says in one line what to do.
STOPPING = (
    SettingsError,
    BootstrapKeyError,
    DataDirectoryError,
    AuditFileError,
    PlansError,
    SourcesError,
    SignersError,
    WebhooksError,
    MetricsPortError,
    PortInUse,
)


def main() -> int:
    """Run the process; returns its exit status."""
    try:
        os.umask(0o077)  # what it writes is for its own user
        settings = read_settings(StoreSettings, "adapter-store", sys.argv[1:], os.environ)
        set_up_logging("adapter_store", settings.log_format, settings.log_level)
        uvloop.run(serve(settings))
    except STOPPING as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
