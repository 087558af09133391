"""The metrics of a runner of batches."""

from __future__ import annotations

from loraplex.runtime.telemetry.metrics import Meters


class RunnerMetrics(Meters):
    """The metrics of one runner."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = self.gauge("runner_batches", "Batches that run now.")
        self.lines = self.counter("runner_lines", "Lines that ended, by how.", ("result",))
        self.waits = self.counter("runner_waits", "Waits of lines, for their quota or the cluster.", ("reason",))
        self.lost = self.counter("runner_leases_lost", "Batches that another runner took over.")
