"""Certificates where base and KV cache are quantized: an unfit adapter is refused with figures, a fit one served."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import grpc
import pytest
from loraplex.cluster.v1 import cluster_pb2, cluster_pb2_grpc
from loraplex_client import AsyncStoreClient, FailedPreconditionError, FitnessCertificate

from artifacts.base_model import read_base_model
from artifacts.certificate import PROMPTS_FIELD
from tests.cancelling_adapter import write_cancelling_adapter
from tests.e2e.conftest import TENANT, running_cluster

pytestmark = pytest.mark.model
EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "model"
PROMPTS = ("Return a list of", "The default value", "If the file")


def sound_adapter(directory: Path) -> Path:
    """Copy one of the shipped adapters, with prompts for its certificate."""
    shutil.copytree(EXAMPLES / "adapters" / "acme" / "shout", directory)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {PROMPTS_FIELD: PROMPTS}))
    return directory


async def test_an_adapter_that_breaks_on_four_bits_is_refused_with_its_figures(
    tmp_path: Path, one_thread: None
) -> None:
    from worker.engine.evaluation.certify import certify

    adapters = {
        "sound": sound_adapter(tmp_path / "sound"),
        "broken": write_cancelling_adapter(MODEL, tmp_path / "broken", PROMPTS),
    }
    original = read_base_model(str(MODEL)).digest
    started = running_cluster(tmp_path / "cluster", str(MODEL), adapters, quantize="int4", kv_cache_dtype="int8")
    async with started as running:
        figures = {}
        async with AsyncStoreClient(running.local.store, TENANT) as store:
            for name, directory in adapters.items():
                figures[name] = await asyncio.to_thread(certify, str(MODEL), "int4", str(directory))
                revision = (await store.get(name))[1].name
                await store.certify(revision, FitnessCertificate("int4", original, **asdict(figures[name])))
        answer = await running.client.generate(PROMPTS[0], adapter_id="sound", max_new_tokens=8)
        assert answer.token_ids
        with pytest.raises(FailedPreconditionError) as caught:
            await running.client.generate(PROMPTS[0], adapter_id="broken", max_new_tokens=8)
        assert caught.value.reason == "ADAPTER_UNFIT"
        assert f"int4: greedy agreement {figures['broken'].agreement:.3g} is below 0.8" in caught.value.message
        async with grpc.aio.insecure_channel(running.local.router) as channel:
            cluster, metadata = cluster_pb2_grpc.ClusterServiceStub(channel), (("x-loraplex-tenant", TENANT),)
            await cluster.WarmAdapter(cluster_pb2.WarmAdapterRequest(adapter="sound"), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError, match="unfit for model, whose weights are int4") as refused:
                await cluster.WarmAdapter(cluster_pb2.WarmAdapterRequest(adapter="broken"), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
