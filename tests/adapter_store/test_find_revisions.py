"""Names of revisions by their digests, of any tenant's adapters: for those who see the whole cluster."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.contracts.artifacts.base_model import BaseModel
from tests.adapter_store.conftest import CONFIG, WEIGHTS


async def test_digests_have_the_names_of_all_tenants_and_of_deleted_adapters(client: Any, hash_base: BaseModel) -> None:
    await client.register(hash_base)

    async def upload(tenant: str, adapter: str, weights: bytes, **header: str) -> str:
        sent = await client.upload(adapter, {CONFIG: b"{}", WEIGHTS: weights}, tenant, **header)
        return str(sent.revision.digest)

    old = await upload("acme", "support", b"one")
    new = await upload("acme", "support", b"two")
    await upload("acme", "support", b"two", alias="canary")
    assert await upload("globex", "copied", b"two") == new
    gone = await upload("globex", "gone", b"three")
    await client.call("DeleteAdapter", pb.DeleteAdapterRequest(name="gone"), "globex")
    unknown = "sha256:" + "f" * 64

    # The call names no tenant: an operator sees all of them.
    request = pb.FindRevisionsRequest(digests=[gone, unknown, new, old])
    found = (await client.call("FindRevisions", request, None)).revisions
    assert [(one.digest, one.adapter, list(one.aliases), one.HasField("delete_time")) for one in found] == [
        (gone, "tenants/globex/adapters/gone", [], True),
        (new, "tenants/acme/adapters/support", ["canary", "live"], False),
        (new, "tenants/globex/adapters/copied", ["live"], False),
        (old, "tenants/acme/adapters/support", [], False),
    ]


@pytest.mark.parametrize(
    ("digests", "problem"), [(["live"], "not sha256:"), (["sha256:" + "0" * 64] * 1001, "at most 1000")]
)
async def test_requests_are_bounded(client: Any, digests: list[str], problem: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="digests") as caught:
        await client.call("FindRevisions", pb.FindRevisionsRequest(digests=digests), None)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in str(caught.value.details())
