"""The worker: an I/O process (`io`) and an engine process (`engine`), which meet in `ipc.py` and `engine_api.py`."""

import os

# gRPC reads it when it is imported. Where a process forks while its calls are under way, gRPC's handlers of fork() kill
# one of some hundred children before they execute their program; no child of ours uses its parent's gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
