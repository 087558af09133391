"""`python -m tests.trials.chaos --help`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # gRPC reads it when it is imported, and says something of every process that is started.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as in worker/__init__.py
    from tests.trials.chaos.command import main

    sys.exit(main())
