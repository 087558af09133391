"""The statistics that an engine reports after each step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Removal:
    """Numbers of things that were removed from a place, and of those that are left there because they are in use.

    `of_all_tenants`: the place does not know whose its things are, and was emptied.
    """

    removed: int = 0
    left: int = 0
    of_all_tenants: bool = False


@dataclass(frozen=True, slots=True)
class TierStats:
    """The adapter cache's tiers. Bytes are counted as stored."""

    # Adapters that came into a slot, and those that had to leave theirs for another, since the start.
    loads: int
    swaps: int
    # Adapters that could not be read, copied or put into a slot, since the start.
    load_failures: int
    # Adapters that are being read from disk now.
    loading: int
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The contents of an engine. blocks_free + blocks_cached + blocks_referenced is all of its blocks."""

    steps: int
    rows_running: int
    rows_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_referenced: int
    slots_used: int
    slots_pinned: int
    # Digests of the resident adapters.
    adapters: tuple[str, ...]
    # Sequences that found their adapter in a slot when they came, and those that did not, since the start.
    adapter_hits: int
    adapter_misses: int
    tiers: TierStats
    # Sequences that came, since the start, those that were complete on arrival as well.
    sequences_taken: int
    # Since the start: sequences that had to give their blocks back; tokens that steps computed; tokens that sequences
    # came with, and how many of these the prefix cache had.
    preemptions: int
    computed_tokens: int
    prefix_queries: int
    prefix_hits: int
