"""Runs a worker: `loraplex worker` (the I/O process, which starts the engine process), and `plan` after it.

The commands of MODEL_TOOLS after it compute with a model and end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from loraplex.contracts.artifacts import ArtifactError
from loraplex.runtime.interpreter import importing, starting
from loraplex.runtime.rpc.settings import SettingsError, read_settings
from loraplex.worker import cluster_plan, plan
from loraplex.worker.cluster_plan import LoadSettings
from loraplex.worker.engine_api import ModelUnusableError

# Commands of the package loraplex.model_tools.
MODEL_TOOLS = ("quantize", "import-gguf", "convert-adapter", "report", "certify")


@starting(ArtifactError)
def main(argv: Sequence[str]) -> int:
    """Run until told to stop."""
    match [*argv]:
        case ["plan", *flags]:
            return _plan(flags)
        case [command, *flags] if command in MODEL_TOOLS:
            return int(import_module("loraplex.model_tools.commands").run(command, flags))
    _work(argv)
    return 0


def _work(argv: Sequence[str]) -> None:
    with importing():
        import uvloop

        from loraplex.runtime.telemetry.logging import environment_of, set_up_logging
        from loraplex.worker.io.app import run
        from loraplex.worker.io.settings import WorkerSettings
    settings = read_settings(WorkerSettings, "worker", argv, os.environ)
    set_up_logging("worker", settings.log_format, settings.log_level)
    os.environ.update(environment_of(settings.log_format, settings.log_level))  # for the engine process
    uvloop.run(run(settings))


def _plan(argv: list[str]) -> int:
    """Print the plan of a device or, with --cluster, of a cluster. Raises SettingsError, ArtifactError."""
    try:
        if any(word.startswith("--cluster") for word in argv):
            settings = read_settings(LoadSettings, "worker-plan", argv, {}, command="loraplex plan --cluster")
            cluster = cluster_plan.plan_cluster(settings, rank_parts(settings))
            print(plan.as_json(cluster) if settings.json else cluster_plan.as_lines(cluster))
            return 0
        of_device = read_settings(plan.PlanSettings, "worker-plan", argv, {}, command="loraplex plan")
        result = plan.plan(of_device, rank_parts(of_device))
        print(plan.as_json(result) if of_device.json else plan.as_lines(result))
    except (ValueError, ModelUnusableError) as error:
        raise SettingsError(str(error)) from error
    return 0


def rank_parts(settings: plan.PlanSettings | LoadSettings) -> plan.Divide:
    """Return what divides the model among ranks. Only then torch is imported, which the engine's rules need."""

    def divide(columns: int) -> list[plan.RankParts]:
        if settings.tensor_parallel == 1:
            return []
        from loraplex.worker.engine.parallel.splits import RankPlan
        from loraplex.worker.engine.quantized.stored import transformers_config

        config, ranks = transformers_config(Path(settings.model)), settings.tensor_parallel
        return [RankPlan(config, rank, ranks, columns) for rank in range(ranks)]

    return divide


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
