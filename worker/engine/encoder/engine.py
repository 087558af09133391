"""The step of an engine over an encoder; usable alone, in a script or a notebook.

engine = build_encoder(EngineConfig("path/to/encoder"))
engine.add_sequence(NewSequence("a", (101, 7592, 102), stopping=Stopping(max_tokens=0), encode=Encode("embed")))
while engine.has_work(): print(engine.step())
"""

from __future__ import annotations

import logging

from worker.engine.device.out_of_memory import is_out_of_memory
from worker.engine.encoder.runner import EncoderRunner
from worker.engine.encoder.scheduler import EncoderScheduler
from worker.engine.engine import Engine
from worker.engine.lora.adapter_memory import PackedAdapter
from worker.engine.model.encoding import NO_CLASSIFIER
from worker.engine.scheduling.adapter_cache import AdapterCache
from worker.engine_api import NewSequence, Output, SequenceRefusedError

_log = logging.getLogger(__name__)


class EncoderEngine(Engine[EncoderScheduler]):
    """An encoder as an Engine: texts of any length and adapter in one batch."""

    def __init__(
        self, scheduler: EncoderScheduler, runner: EncoderRunner, adapters: AdapterCache[PackedAdapter]
    ) -> None:
        super().__init__(scheduler.limits, scheduler, adapters)
        self._runner = runner

    def add_sequence(self, sequence: NewSequence) -> None:
        """See Engine."""
        encode = sequence.encode
        if encode and encode.task == "classify" and sequence.adapter is None and not self._runner.classifies:
            raise SequenceRefusedError("adapter", NO_CLASSIFIER.message)
        super().add_sequence(sequence)

    def step(self) -> list[Output]:
        """Compute one batch of texts."""
        outputs = self._scheduler.take_arrivals()
        batch = self._scheduler.schedule()
        if not batch:
            return outputs
        try:
            results = self._runner.run(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("memory is not enough for a step of %d texts", len(batch))
        else:
            return outputs + self._scheduler.commit(batch, results)
        # Only here, because the exception holds the frames of the failed step, and with them its tensors.
        return outputs + self._scheduler.revoke(batch)
