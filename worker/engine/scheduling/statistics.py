"""The scheduler's counters, and the statistics that an engine reports after each step."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.scheduling.blocks import BlockManager
from worker.engine.scheduling.residency import Residency
from worker.engine.scheduling.running import RunningSequences
from worker.engine.scheduling.waiting import WaitingSequences
from worker.engine_api.stats import EngineStats


@dataclass(slots=True)
class Counters:
    """Counts since the start; see EngineStats."""

    steps: int = 0
    sequences_taken: int = 0
    computed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def engine_stats(
    counters: Counters, running: RunningSequences, waiting: WaitingSequences, blocks: BlockManager, residency: Residency
) -> EngineStats:
    """Gather what the parts of a scheduler hold now."""
    return EngineStats(
        steps=counters.steps,
        rows_running=len(running),
        rows_waiting=len(waiting),
        blocks_free=blocks.free,
        blocks_cached=blocks.cached,
        blocks_referenced=blocks.referenced,
        slots_used=residency.used,
        slots_pinned=residency.pinned,
        adapters=residency.resident,
        sequences_taken=counters.sequences_taken,
        adapter_hits=waiting.hits,
        adapter_misses=waiting.misses,
        tiers=residency.tiers,
        preemptions=running.preemptions,
        computed_tokens=counters.computed_tokens,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
    )
