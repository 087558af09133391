"""The worker's settings: what its engine gets of them."""

from __future__ import annotations

import pytest

from loraplex.worker.engine_api import EngineConfig, Speculation
from loraplex.worker.io.settings import WorkerSettings

REQUIRED = ("hash:?", "127.0.0.1:1", "redis://127.0.0.1:1")


@pytest.mark.parametrize(
    ("device", "rows", "step_tokens"), [("cpu", 32, 512), ("cuda", 256, 4096), ("cuda:3", 256, 4096)]
)
def test_a_device_has_defaults_of_its_own(device: str, rows: int, step_tokens: int) -> None:
    config = WorkerSettings(*REQUIRED, device=device).engine_config()
    assert (config.device, config.rows, config.step_tokens) == (device, rows, step_tokens)
    assert (config.adapter_slots, config.fewer_slots) == (32, True)
    chosen = WorkerSettings(
        *REQUIRED, device=device, rows=5, step_tokens=64, max_rank=8, adapter_slots=4, speculative_config="off"
    ).engine_config()
    assert chosen == EngineConfig("hash:?", device, rows=5, step_tokens=64, max_rank=8, adapter_slots=4)


def test_drafts_are_configured_as_in_vllm_or_not_at_all() -> None:
    def chosen(text: str, device: str = "cpu") -> Speculation | None:
        return WorkerSettings(*REQUIRED, device=device, speculative_config=text).engine_config().speculation

    assert chosen('{"method": "suffix", "num_speculative_tokens": 3}') == Speculation("suffix", 3)
    assert chosen("off") is None
    assert (chosen(""), chosen("", "cuda:1")) == (Speculation(), None)
    with pytest.raises(ValueError, match=r"^--speculative-config: method: 'eagle' is not supported; use 'suffix'"):
        chosen('{"method": "eagle"}')


def test_a_cell_has_a_name_that_keys_may_have() -> None:
    with pytest.raises(ValueError, match="--cell 'a b': a cell's name has letters, digits"):
        WorkerSettings(*REQUIRED, cell="a b")
