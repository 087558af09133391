"""Benchmarks against other engines and against the machine's limits; `python -m bench` runs all of them."""

import os

# As in worker/__init__.py: a benchmark starts the processes of a cluster while its calls are under way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
