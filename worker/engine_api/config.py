"""The configuration that an engine is built from, and the limits that it then has."""

from __future__ import annotations

from dataclasses import dataclass

from artifacts.kv_shape import check_kv_cache_dtype


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that decides how an engine is built; zero blocks, bytes or threads mean: as many as fit."""

    # A transformers directory, or `hash:?...`.
    model: str
    device: str = "cpu"
    dtype: str = "auto"
    # Sequences in one batch at most.
    rows: int = 32
    kv_blocks: int = 0
    # Tokens in a block.
    block_size: int = 16
    adapter_slots: int = 32
    # Maximum bytes of adapters in host memory.
    host_adapter_bytes: int = 0
    max_rank: int = 64
    # Maximum tokens that one step computes.
    step_tokens: int = 512
    # CPU threads of the step.
    threads: int = 0
    # The scheme in which the weights are loaded, such as int8; empty: as the files have them.
    quantize: str = ""
    # The dtype of the KV cache: int8; empty: that in which the model computes.
    kv_cache_dtype: str = ""

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError for a number that no engine can work with, ArtifactError for a dtype."""
        check_kv_cache_dtype(self.kv_cache_dtype)
        for name in ("rows", "block_size", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an engine; measured at start-up, never changed."""

    rows: int
    # Maximum tokens of a sequence, prompt and answer together; the KV cache holds so many.
    max_tokens: int
    max_rank: int
    vocab_size: int
    block_size: int
    blocks: int
    adapter_slots: int

    def __post_init__(self) -> None:
        """Raise ValueError where the KV cache cannot hold the longest sequence: the worker would claim such jobs."""
        # The last token is never an input: its keys and values are not kept.
        if self.max_tokens > self.blocks * self.block_size + 1:
            raise ValueError(f"{self.blocks} blocks of {self.block_size} do not hold max_tokens, {self.max_tokens}")
