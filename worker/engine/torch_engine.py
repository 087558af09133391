"""The step of an engine over a transformers model; usable alone, in a script or a notebook.

engine = build_engine(EngineConfig("path/to/model", rows=8))
engine.add_sequence(NewSequence("a", prompt_ids=(1, 2, 3), adapter=AdapterSource(digest, "path/to/adapter")))
while engine.has_work(): print(engine.step())
"""

from __future__ import annotations

import logging
import time

from worker.engine.device.out_of_memory import is_out_of_memory
from worker.engine.lora.adapter_memory import PackedAdapter
from worker.engine.model.encoding import Encoding
from worker.engine.model.runner import Runner
from worker.engine.sampling.step import InFlight
from worker.engine.scheduled_engine import ScheduledEngine
from worker.engine.scheduling.adapter_cache import AdapterCache
from worker.engine.scheduling.chunk_sizer import ChunkSizer, StepTimer
from worker.engine.scheduling.grammars import GrammarThread
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.scheduling.sequence import Batch
from worker.engine_api import NewSequence, Output
from worker.engine_api.config import EngineLimits

_log = logging.getLogger(__name__)


class TorchEngine(ScheduledEngine[Scheduler]):
    """A transformers model as an Engine: continuous batching, a different adapter in every row.

    One that steps ahead launches a step before it collects the one before, so that the device never waits for the host,
    which schedules, lays out and reports meanwhile.

        device            │      step 1      │      step 2      │      step 3 ...
        host     launch 1, launch 2 │ collect 1, launch 3 │ collect 2, launch 4 ...
    """

    def __init__(
        self,
        limits: EngineLimits,
        scheduler: Scheduler,
        runner: Runner,
        encoding: Encoding,
        adapters: AdapterCache[PackedAdapter],
        grammars: GrammarThread,
        chunk_sizer: ChunkSizer | None,
        *,
        ahead: bool,
    ) -> None:
        super().__init__(limits, scheduler, adapters, grammars)
        self._runner = runner
        self._encoding = encoding
        self._chunk_sizer = chunk_sizer
        self._timer = StepTimer()
        self._ahead = ahead
        self._in_flight: InFlight | None = None

    def add_sequence(self, sequence: NewSequence) -> None:
        """See Engine."""
        super().add_sequence(self._encoding.prepare(sequence))

    def has_work(self) -> bool:
        """See Engine."""
        return self._in_flight is not None or super().has_work()

    def step(self) -> list[Output]:
        """Launch one step of the batch, and collect it, or, stepping ahead, the one before it."""
        outputs = self._scheduler.take_arrivals()
        batch = self._scheduler.schedule()
        step = self._launch(batch, outputs) if batch else None
        if self._ahead:
            step, self._in_flight = self._in_flight, step
        if step is not None:
            sampled = step.collect()
            seconds = self._timer.collected(time.monotonic())
            if self._chunk_sizer is not None:
                self._chunk_sizer.observe(step.batch, seconds)
            outputs += self._scheduler.commit(step.batch, sampled.ids, sampled.logprobs, sampled.failures)
        return outputs

    def _launch(self, batch: Batch, outputs: list[Output]) -> InFlight | None:
        """Launch a batch; None where memory is not enough for it. Add the outputs of sequences that end for that."""
        began = time.monotonic()
        try:
            step = self._runner.launch(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("memory is not enough for a step of %d rows, %d tokens", len(batch.rows), batch.tokens)
        else:
            self._timer.launched(began)
            return step
        # Only here, because the exception holds the frames of the failed step, and with them its tensors.
        outputs += self._scheduler.revoke(batch)
        return None

    def close(self) -> None:
        """See Engine."""
        self._runner.close()
        super().close()
