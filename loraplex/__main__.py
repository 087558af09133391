"""The command `loraplex`. The processes of a cluster start without the rest of the command, which images may lack."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from loraplex.runtime.interpreter import importing

# gRPC's C library reads it when it is imported; else it writes to stderr of errors that its calls raise as well.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Module of each process, whose `main` takes its arguments, the extra that installs its packages, and what
# `loraplex --help` says of it.
PROCESSES = {
    "router": (
        "loraplex.router.__main__",
        "router",
        "Take gRPC calls, queue them in Redis and stream the workers' tokens back.",
    ),
    "worker": (
        "loraplex.worker.__main__",
        "worker",
        "Run a base model with its adapters for the jobs of the Redis queues.",
    ),
    "store": ("loraplex.adapter_store.__main__", "store", "Keep base models, adapters, releases and API keys."),
    "gateway": (
        "loraplex.gateway.__main__",
        "gateway",
        "Serve the HTTP protocols of OpenAI, Anthropic, and LoRAX and TGI.",
    ),
    "runner": ("loraplex.batch_runner.__main__", "gateway", "Run the batches that tenants have made at the store."),
    "scaler": (
        "loraplex.operator.scaler.__main__",
        "operator",
        "Tell KEDA and Prometheus how many workers each model needs.",
    ),
    "operator": (
        "loraplex.operator.__main__",
        "operator",
        "Import and release the adapters that Kubernetes objects name.",
    ),
    "backup": ("loraplex.transfers.backup", "store", "Copy a store's data, also while it runs."),
    "probe": ("loraplex.runtime.rpc.probe", "", "Exit with 0 if the server at an address is ready."),
}


@contextmanager
def _extra_installed(name: str, extra: str) -> Iterator[None]:
    """Exit with 2, and one line that names the extra, where `name` meets a package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "loraplex":
            raise
        print(
            f"error: {name} needs {package}, which is not installed: pip install 'loraplex[{extra}]'", file=sys.stderr
        )
        sys.exit(2)


def run_process(name: str, argv: Sequence[str]) -> int:
    """Run one of PROCESSES until it ends; return its exit status. Exits with 2 where its extra is not installed."""
    module, extra, _ = PROCESSES[name]
    with _extra_installed(name, extra):
        with importing():
            run = import_module(module).main
        return int(run(argv))


def main() -> None:
    """Run the process or the command that the arguments name, and exit."""
    if sys.argv[1:] and sys.argv[1] in PROCESSES:
        sys.exit(run_process(sys.argv[1], sys.argv[2:]))
    with _extra_installed("this command", "cli"):
        with importing():
            command = import_module("loraplex.cli.__main__").main
        command()


if __name__ == "__main__":
    main()
