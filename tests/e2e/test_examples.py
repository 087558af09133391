"""The documented experiments of examples/, with the shipped model and its adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from loraplex_client import Client

from examples import raw_stub, structured
from tests.e2e.conftest import TENANT, Cluster, running_cluster

pytestmark = pytest.mark.model
EXAMPLES = Path(structured.__file__).parent
ADAPTERS = {path.name: path for path in sorted((EXAMPLES / "adapters").glob("*/*"))}
FLAGS = ("--dtype", "float32", "--threads", "1", "--rows", "8", "--kv-blocks", "64")
Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A worker with the shipped model in float32 and its adapters, all of tenant acme."""
    directory = tmp_path_factory.mktemp("shipped") / "cluster"
    async with running_cluster(directory, str(EXAMPLES / "model"), ADAPTERS, worker_flags=FLAGS) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_persons_and_entities_have_their_shape(cluster: Cluster, eventually: Eventually) -> None:
    def run() -> dict[str, list[object]]:
        with Client(cluster.local.router, TENANT) as client:
            return structured.run(client)

    answers = await asyncio.to_thread(run)
    raw = await asyncio.to_thread(lambda: "".join(raw_stub.generate(cluster.local.router, "The for statement", 8)))
    with pytest.raises(grpc.RpcError) as refused:
        await asyncio.to_thread(lambda: list(raw_stub.generate(cluster.local.router, "", 8)))
    await eventually(cluster.idle)
    assert raw
    assert raw_stub.explain(refused.value).startswith("INVALID_ARGUMENT: prompt: ")
    assert raw_stub.explain(refused.value).endswith("reason INVALID_FIELD")
    for answer in answers["person"][:2]:
        assert isinstance(answer, dict)
        assert len(answer["name"]) <= 10
        assert isinstance(answer["age"], int)
    for answer in answers["entities"][:2]:
        assert isinstance(answer, dict)
        assert list(answer) == ["people", "organizations", "places", "dates"]


def test_every_weight_in_a_byte(one_thread: None) -> None:
    from examples import quantized

    found = quantized.run()
    whole, small = found["bytes"]
    assert 0.25 <= small / whole < 0.251
    # Half a step is the most that rounding takes: a step is 1/255 of a tensor's range.
    assert 0 < found["mean_error"] < max(found["errors"].values()) < 0.003
    before, after = found["texts"]
    assert before.startswith(quantized.PROMPT)
    assert after[:60] == before[:60]
