from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.worker.engine_api import EngineConfig


@pytest.fixture
def make_encoder(one_thread: None) -> Iterator[Callable[..., Any]]:
    """Call with (directory, **settings): an engine in float32, closed after the test."""
    from loraplex.encoders.engine import build_encoder

    engines = []

    def make(directory: Path, **settings: Any) -> Any:
        engines.append(build_encoder(EngineConfig(str(directory), dtype="float32", max_rank=8, **settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
