"""Several adapters in one request, through the whole cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loraplex.contracts.artifacts.names import weighted_digest
from loraplex.contracts.options import StoppingParams
from loraplex_client import FailedPreconditionError, Generation, InvalidRequestError, LoraplexError, NotFoundError
from tests.e2e.answers.conftest import MODEL
from tests.e2e.conftest import Cluster
from tests.hash_oracle import expected_ids

pytestmark = pytest.mark.asyncio(loop_scope="package")
PROMPT, TOKENS = "several adapters", 24


async def test_a_set_is_an_adapter_of_its_own(cluster: Cluster) -> None:

    async def ask(adapters: Any) -> Generation:
        answer: Generation = await cluster.client.generate(PROMPT, adapters=adapters, max_tokens=TOKENS)
        return answer

    def truth(digest: str) -> tuple[int, ...]:
        prompt = tuple(PROMPT.encode())
        return expected_ids(MODEL, prompt, adapter_digest=digest, stopping=StoppingParams(max_tokens=TOKENS))

    sets: list[list[tuple[str, float]]] = [
        [("a", 0.5), ("b", 0.5)],
        [("a", 0.5), ("b", -0.5)],
        [("a", 0.5)],
        [("a", 0.1), ("b", 0.7), ("c", -2.0)],
        [("a@live", 1.0), ("tenants/acme/adapters/c", 3.0)],
    ]
    seen = {truth(""), *(truth(digest) for digest in cluster.digests.values())}
    for some, answer in zip(sets, await asyncio.gather(*map(ask, sets)), strict=True):
        named = [(name.partition("@")[0].rpartition("/")[2], weight) for name, weight in some]
        digest = weighted_digest((cluster.digests[name], weight) for name, weight in named)
        assert answer.token_ids == truth(digest)
        assert answer.adapter_revision == digest
        assert [revision for revision, _ in answer.adapters] == [
            f"tenants/acme/adapters/{name}/revisions/{cluster.digests[name]}" for name, _ in named
        ]
        assert [weight for _, weight in answer.adapters] == pytest.approx([weight for _, weight in named])
        assert answer.token_ids not in seen
        seen.add(answer.token_ids)
    turned = await ask({"b": 0.5, "a": 0.5})
    assert turned.token_ids == truth(weighted_digest([(cluster.digests["a"], 0.5), (cluster.digests["b"], 0.5)]))
    assert [weight for _, weight in turned.adapters] == [0.5, 0.5]
    whole = await ask({"b": 1.0})
    assert (whole.token_ids, whole.adapters) == (truth(cluster.digests["b"]), ())
    assert whole.adapter_revision.endswith(cluster.digests["b"])


async def test_what_is_no_set_is_refused_by_its_field(cluster: Cluster) -> None:

    async def refusal(**options: Any) -> LoraplexError:
        with pytest.raises(LoraplexError) as caught:
            await cluster.client.generate("x", max_tokens=1, **options)
        return caught.value

    async def is_invalid(field: str, message: str, **options: Any) -> None:
        error = await refusal(**options)
        assert isinstance(error, InvalidRequestError), error
        assert (error.field, message in str(error)) == (field, True), error

    await is_invalid("adapters", "either", adapter_id="a", adapters={"b": 1.0})
    await is_invalid("adapters", "9 adapters; at most 8", adapters={f"a{number}": 1.0 for number in range(9)})
    await is_invalid("adapters[1].weight", "0", adapters=[("a", 1.0), ("b", 0.0)])
    await is_invalid("adapters[0].weight", "nan", adapters=[("a", float("nan"))])
    await is_invalid("adapters[0].weight", "inf", adapters=[("a", float("inf"))])
    await is_invalid("adapters[1].adapter", "twice", adapters=[("a", 1.0), ("a", 2.0)])
    await is_invalid("adapters[1]", "same", adapters=[("a", 1.0), ("a@live", 2.0)])
    await is_invalid("adapters[0].adapter", "empty", adapters=[("", 1.0)])
    await is_invalid("adapters[1]", "A B", adapters=[("a", 1.0), ("A B", 1.0)])

    # A missing adapter and another tenant's get the same message, in a set as alone.
    for name in ("nowhere", "tenants/globex/adapters/a"):
        missing = await refusal(adapters=[("a", 1.0), (name, 1.0)])
        assert isinstance(missing, NotFoundError)
        assert str(missing) == str(await refusal(adapter_id=name))

    # The workers take the rank of a, b and c together, not that of a, b and wide.
    error = await refusal(adapters={"a": 1.0, "b": 1.0, "wide": 1.0})
    assert isinstance(error, FailedPreconditionError), error
    assert "adapters: ranks 8 + 8 + 16 = 32; the workers take at most 24" in str(error)
    await cluster.client.generate("x", max_tokens=1, adapters={"a": 1.0, "wide": 1.0})
