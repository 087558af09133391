"""The cluster that the tests of this folder share; each leaves it idle."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from loraplex.contracts.options import SamplingParams, StoppingParams
from tests.e2e.conftest import Cluster, running_cluster, write_hash_adapters
from tests.hash_oracle import expected_ids

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
MODEL = "hash:?vocab=32000&seed=1&step_ms=5"


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Two workers, the adapters a, b and c of rank 8, and `wide` of rank 16; workers take ranks up to 24."""
    directory = tmp_path_factory.mktemp("answers")
    adapters = dict(write_hash_adapters(directory / "adapters"))
    wide = adapters["wide"] = directory / "wide"
    wide.mkdir()
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (wide / "adapter_config.json").write_text(json.dumps(config))
    (wide / "adapter_model.safetensors").write_bytes(b"weights of wide")
    flags = ("--max-rank", "24")
    async with running_cluster(directory / "cluster", MODEL, adapters, workers=2, worker_flags=flags) as running:
        yield running


def expected(prompt: str, digest: str, max_tokens: int, sampling: SamplingParams | None = None) -> list[int]:
    """Return the ids that the engine computes."""
    ids = expected_ids(
        MODEL,
        list(prompt.encode()),
        adapter_digest=digest,
        sampling=sampling,
        stopping=StoppingParams(max_tokens=max_tokens),
    )
    return list(ids)
