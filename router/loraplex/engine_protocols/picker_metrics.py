"""The gauges that endpoint pickers read at an engine, under vLLM's names, for all live workers of a router's models.

The Gateway API Inference Extension's model server protocol (docs/proposals/003-model-server-protocol) asks for the
queue, the use of the KV cache and the adapters that are ready; vllm:lora_adapter_loaded is that of vLLM's pull request
45411. Workers report adapters by their digests. A router knows the names of those that its own requests use: the latest
ADAPTERS of these are in labels.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from loraplex.contracts.artifacts.names import parse_revision_name
from loraplex.contracts.broker.messages import WorkerState
from loraplex.contracts.broker.terms import ADAPTER_DIGITS
from loraplex.router.catalog.models import Models
from loraplex.router.dispatch.dispatcher import Dispatcher
from loraplex.router.metrics import RouterMetrics

# Maximum number of adapters that labels name, the latest used: with names of 60 characters 15 KB of each scrape.
ADAPTERS = 256
# Timeout in seconds of the event loop's answer, after which a scrape goes without these gauges.
_LOOP_S = 1.0
_OF_MODEL = ("model_name",)
_INFO = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


class PickerMetrics(Collector):
    """Collects the gauges on the router's event loop, when they are scraped."""

    def __init__(self, models: Models, dispatcher: Dispatcher, metrics: RouterMetrics) -> None:
        """Remember the running event loop."""
        self._models, self._dispatcher, self._metrics = models, dispatcher, metrics
        self._loop = asyncio.get_running_loop()
        # Full names by the last digits of the digest, as workers report them; the latest used come last.
        self._names: OrderedDict[str, str] = OrderedDict()

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering need not collect, as nobody else has these names."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; none while the event loop hangs or has ended."""
        collected: Future[list[Metric]] = Future()

        def run() -> None:
            if not collected.set_running_or_notify_cancel():
                return
            try:
                collected.set_result(self.families())
            except Exception as error:  # the scrape's thread raises it
                collected.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
            yield from collected.result(_LOOP_S)
        except (RuntimeError, TimeoutError):
            collected.cancel()

    def families(self) -> list[Metric]:
        """Return the gauges. Call it on the event loop."""
        names = [model.manifest.name for model in self._models.served]
        workers = {name: self._models.workers(name) for name in names}
        [family] = self._metrics.waiting.collect()
        queued = {sample.labels["model"]: sample.value for sample in family.samples}
        running = {(name,): sum(state.rows_running for state in states) for name, states in workers.items()}
        waiting = {
            (name,): queued.get(name, 0) + sum(state.rows_waiting for state in states)
            for name, states in workers.items()
        }
        used = {(name,): _block_use(states) for name, states in workers.items()}
        return [
            _gauge("num_requests_running", "Sequences in the workers' batches.", _OF_MODEL, running),
            _gauge("num_requests_waiting", "Jobs in the queue, and sequences that wait.", _OF_MODEL, waiting),
            _gauge("kv_cache_usage_perc", "Share of the workers' KV blocks in use, 0 to 1.", _OF_MODEL, used),
            *self._of_adapters([state for states in workers.values() for state in states]),
        ]

    def _of_adapters(self, workers: Sequence[WorkerState]) -> Iterator[Metric]:
        running, waiting = self._adapters_of_jobs()
        holders = Counter(digits for state in workers for digits in state.adapters)
        loaded = {(self._names[one], "gpu"): holders[one] for one in reversed(self._names) if holders[one]}
        ready = dict.fromkeys([*running, *(name for name, _ in loaded)])
        slots = sum(state.slots_total for state in workers)
        info = {(str(slots), ",".join(ready), ",".join(waiting)): time.time()}
        yield _gauge("lora_requests_info", "Adapters that are loaded or run, and that wait.", _INFO, info)
        text = "Workers that have the adapter on their device."
        yield _gauge("lora_adapter_loaded", text, ("adapter_name", "level"), loaded)

    def _adapters_of_jobs(self) -> tuple[list[str], list[str]]:
        """Return the names of the adapters of this router's jobs that run, and that wait; remember them."""
        running, waiting = dict[str, None](), dict[str, None]()
        for routed in self._dispatcher.jobs:
            adapter = routed.job.adapter
            if adapter is None or adapter.parts:  # a set has no name
                continue
            name = str(parse_revision_name(adapter.revision).adapter_name)
            digits = adapter.digest[-ADAPTER_DIGITS:]
            self._names[digits] = name
            self._names.move_to_end(digits)
            (waiting if routed.link is None else running)[name] = None
        while len(self._names) > ADAPTERS:
            self._names.popitem(last=False)
        return list(running)[-ADAPTERS:], list(waiting)[-ADAPTERS:]


def _block_use(workers: Sequence[WorkerState]) -> float:
    blocks = sum(state.blocks_total for state in workers)
    return sum(state.blocks_referenced for state in workers) / blocks if blocks else 0.0


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family
