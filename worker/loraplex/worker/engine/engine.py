"""An engine as the engine process drives it, from one thread; each kind of engine adds its step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import Any, Generic, TypeVar

from loraplex.worker.engine.scheduling.adapter_cache import AdapterCache
from loraplex.worker.engine.scheduling.grammars import GrammarThread
from loraplex.worker.engine.scheduling.scheduler import SequenceScheduler
from loraplex.worker.engine_api import CachedBlock, EngineLimits, EngineStats, NewSequence, Output, Removal

S = TypeVar("S", bound=SequenceScheduler)


class Engine(ABC, Generic[S]):
    """Serves one base model: a scheduler manages its sequences, a cache its adapters."""

    def __init__(self, scheduler: S, adapters: AdapterCache[Any], grammars: GrammarThread | None = None) -> None:
        self._scheduler = scheduler
        self.adapters = adapters
        self._grammars = grammars

    @property
    def limits(self) -> EngineLimits:
        """Return what the engine can take."""
        return self._scheduler.limits

    def add_sequence(self, sequence: NewSequence) -> None:
        """Take a sequence, and start loading its adapter where it is not resident. Raises SequenceRefusedError."""
        self._scheduler.add_sequence(sequence)

    def abort(self, sequence_id: str) -> None:
        """Forget a sequence and free all it holds, at once; unknown ids are ignored."""
        self._scheduler.abort(sequence_id)

    def forget_tenant(self, tenant: str, kept_adapters: Container[str]) -> Mapping[str, Removal]:
        """Remove what is cached of a tenant, and adapters that are not kept; returns what was removed, by place."""
        removals = {"adapters in memory and slots": self.adapters.forget_others(kept_adapters)}
        if self._scheduler.blocks is not None:
            removals["KV blocks"] = self._scheduler.blocks.forget_tenant(tenant, kept_adapters)
        if self._scheduler.drafter is not None:
            removals["drafts"] = self._scheduler.drafter.forget_tenant(tenant, kept_adapters, self._scheduler.sequences)
        if self._grammars is not None:
            removals["compiled formats"] = self._grammars.forget()
        return removals

    def follow_blocks(self, on: bool) -> None:
        """Tell of the prefix cache from now on, first of all that it has; or no more. Without a cache do nothing."""
        if self._scheduler.blocks is not None:
            self._scheduler.blocks.follow(on)

    def block_changes(self, most: int) -> tuple[list[int], list[CachedBlock], bool, bool] | None:
        """Return the next changes of the prefix cache (BlockManager.changes), if it is followed and has any."""
        blocks = self._scheduler.blocks
        return None if blocks is None else blocks.changes(most)

    @abstractmethod
    def step(self) -> list[Output]:
        """Run one step of the batch."""

    def has_work(self) -> bool:
        """Tell whether a step would do anything now (a sequence that waits for its adapter is no work)."""
        return self._scheduler.has_work()

    def stats(self) -> EngineStats:
        """Return what the engine holds now."""
        return self._scheduler.stats()

    def check(self) -> None:
        """Raise an integrity error where the accounting of blocks or adapters contradicts itself."""
        self._scheduler.check()

    def close(self) -> None:
        """End the threads. The memory is freed with the engine."""
        if self._grammars is not None:
            self._grammars.close()
        self.adapters.close()
