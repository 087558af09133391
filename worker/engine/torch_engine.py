"""The step of an engine over a transformers model; usable alone, in a script or a notebook.

engine = build_engine(EngineConfig("path/to/model", rows=8))
engine.add_sequence(NewSequence("a", prompt_ids=(1, 2, 3), adapter=AdapterSource(digest, "path/to/adapter")))
while engine.has_work(): print(engine.step())
"""

from __future__ import annotations

import logging
import time

from worker.engine.adapter_cache.operated_cache import OperatedCache
from worker.engine.device.out_of_memory import is_out_of_memory
from worker.engine.grammar.grammars import GrammarThread
from worker.engine.lora.adapter_memory import PackedAdapter
from worker.engine.model.encoding import Encoding
from worker.engine.model.runner import Runner
from worker.engine.sampling.step import InFlight
from worker.engine.scheduling.batch import Batch
from worker.engine.scheduling.chunk_sizer import ChunkSizer, StepTimer
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine_api import AdapterSource, NewSequence, Output
from worker.engine_api.config import EngineLimits
from worker.engine_api.stats import EngineStats

_log = logging.getLogger(__name__)


class TorchEngine:
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
        adapters: OperatedCache[PackedAdapter],
        grammars: GrammarThread,
        chunk_sizer: ChunkSizer | None,
        *,
        ahead: bool,
    ) -> None:
        self._limits = limits
        self._scheduler = scheduler
        self._runner = runner
        self._encoding = encoding
        self._adapters = adapters
        self._grammars = grammars
        self._chunk_sizer = chunk_sizer
        self._timer = StepTimer()
        self._ahead = ahead
        self._in_flight: InFlight | None = None

    @property
    def limits(self) -> EngineLimits:
        """Return what the engine can take."""
        return self._limits

    def add_sequence(self, sequence: NewSequence) -> None:
        """Take a sequence, and start loading its adapter where it is not resident. Raises SequenceRefusedError."""
        self._scheduler.add_sequence(self._encoding.prepare(sequence))

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence and free all it holds, at once; unknown ids are ignored."""
        self._scheduler.abort(sequence_id)

    def warm_adapter(self, adapter: AdapterSource) -> None:
        """Bring an adapter into a slot as soon as nobody who waits needs it."""
        self._adapters.warm_adapter(adapter)

    def pin_adapter(self, adapter: AdapterSource) -> None:
        """Bring an adapter into a slot and keep it there. Raises ValueError where no slot would be left for others."""
        self._adapters.pin_adapter(adapter)

    def unpin_adapter(self, digest: str) -> None:
        """Let a pinned adapter leave again; unknown digests are ignored."""
        self._adapters.unpin_adapter(digest)

    def has_work(self) -> bool:
        """Tell whether a step would do anything now (a sequence that waits for its adapter is no work)."""
        return self._in_flight is not None or self._scheduler.has_work()

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

    def stats(self) -> EngineStats:
        """Return what the engine holds now."""
        return self._scheduler.stats()

    def check(self) -> None:
        """Raise an integrity error where the accounting of blocks or adapters contradicts itself."""
        self._scheduler.check()

    def close(self) -> None:
        """End the threads. The memory is freed with the engine."""
        self._runner.close()
        self._grammars.close()
        self._adapters.close()
