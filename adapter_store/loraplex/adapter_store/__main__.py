"""`loraplex store`: read the settings, run the store. Exits with 2 and one line when it cannot start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import uvloop

from loraplex.adapter_store.app import StoreSettings, serve
from loraplex.runtime.interpreter import starting
from loraplex.runtime.rpc.settings import read_settings
from loraplex.runtime.telemetry.logging import set_up_logging


@starting()
def main(argv: Sequence[str]) -> None:
    """Run the process."""
    settings = read_settings(StoreSettings, "adapter-store", argv, os.environ)
    set_up_logging("adapter_store", settings.log_format, settings.log_level)
    uvloop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
