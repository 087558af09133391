"""The command `loraplex`. The processes of a cluster start without the rest of the command, which images may lack."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

# Module of each process, whose `main` takes its arguments, and what `loraplex --help` says of it.
PROCESSES = {
    "router": ("loraplex.router.__main__", "Take gRPC calls, queue them in Redis and stream the workers' tokens back."),
    "worker": ("loraplex.worker.__main__", "Run a base model with its adapters for the jobs of the Redis queues."),
    "store": ("loraplex.adapter_store.__main__", "Keep base models, adapters, releases and API keys."),
    "gateway": ("loraplex.gateway.__main__", "Serve the HTTP protocols of OpenAI, Anthropic, and LoRAX and TGI."),
    "scaler": ("loraplex.operator.scaler.__main__", "Tell KEDA and Prometheus how many workers each model needs."),
    "operator": ("loraplex.operator.__main__", "Bring the store to what objects of Kubernetes ask for."),
    "backup": ("loraplex.adapter_store.backup", "Copy all that a store keeps, while it runs."),
    "probe": ("loraplex.runtime.rpc.probe", "Exit with 0 when the process at an address serves."),
}


def run_process(name: str, argv: Sequence[str]) -> int:
    """Run one of PROCESSES until it ends; return its exit status."""
    return int(import_module(PROCESSES[name][0]).main(argv))


def main() -> None:
    """Run the process or the command that the arguments name, and exit."""
    if sys.argv[1:] and sys.argv[1] in PROCESSES:
        sys.exit(run_process(sys.argv[1], sys.argv[2:]))
    from loraplex.cli.__main__ import main as run_command

    run_command()


if __name__ == "__main__":
    main()
