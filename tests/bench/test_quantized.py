"""bench.quantized: each layout that it forces on an unquantized model, tied embeddings included, decodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.models import TINY, save_model
from bench.quantized_engines import LAYOUTS, decoding
from bench.workload import Workload


@pytest.mark.model
def test_a_model_with_tied_embeddings_decodes_in_each_layout(tmp_path: Path) -> None:
    model = save_model(TINY, tmp_path / "model")
    requests = Workload(requests=2, prompt=4, short=3, long=3).draw(1, TINY.vocabulary)
    for layout in LAYOUTS:
        with decoding(model, 2, layout.dtype, "", layout.name) as engine:
            assert engine.run(requests).tokens == 4, layout.name
