"""The step of an engine over an encoder; usable alone, in a script or a notebook.

engine = build_encoder(EngineConfig("path/to/encoder"))
engine.add_sequence(NewSequence("a", (101, 7592, 102), stopping=Stopping(max_tokens=0), encode=Encode("embed")))
while engine.has_work(): print(engine.step())
"""

from __future__ import annotations

import logging

from worker.engine.adapter_cache.operated_cache import OperatedCache
from worker.engine.device.out_of_memory import is_out_of_memory
from worker.engine.encoder.runner import EncoderRunner
from worker.engine.encoder.scheduler import EncoderScheduler
from worker.engine.lora.adapter_memory import PackedAdapter
from worker.engine.pooling import NO_CLASSIFIER
from worker.engine_api import AdapterSource, NewSequence, Output, SequenceRefusedError
from worker.engine_api.config import EngineLimits
from worker.engine_api.stats import EngineStats

_log = logging.getLogger(__name__)


class EncoderEngine:
    """An encoder as an Engine: texts of any length and adapter in one batch."""

    def __init__(
        self, scheduler: EncoderScheduler, runner: EncoderRunner, adapters: OperatedCache[PackedAdapter]
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._adapters = adapters

    @property
    def limits(self) -> EngineLimits:
        """Return what the engine can take."""
        return self._scheduler.limits

    def add_sequence(self, sequence: NewSequence) -> None:
        """Take a text, and start loading its adapter where it is not resident. Raises SequenceRefusedError."""
        encode = sequence.encode
        if encode and encode.task == "classify" and sequence.adapter is None and not self._runner.classifies:
            raise SequenceRefusedError("adapter", NO_CLASSIFIER.message)
        self._scheduler.add_sequence(sequence)

    def abort(self, sequence_id: str) -> None:
        """Forget a text, at once; unknown ids are ignored."""
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
        """Tell whether a step would do anything now (a text that waits for its adapter is no work)."""
        return self._scheduler.has_work()

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

    def stats(self) -> EngineStats:
        """Return what the engine holds now."""
        return self._scheduler.stats()

    def check(self) -> None:
        """Raise an integrity error where the accounting of adapters contradicts itself."""
        self._scheduler.check()

    def close(self) -> None:
        """End the threads. The memory is freed with the engine."""
        self._adapters.close()
