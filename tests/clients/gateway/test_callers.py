"""Callers of the gateway: the shares that they take, and the bytes of their models' tokens."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from loraplex.gateway.cluster import Cluster
from loraplex.gateway.errors import HttpError
from loraplex_client import PermissionDeniedError, UnauthenticatedError, UnavailableError

KEY, LIMITED = "lpx_key_secret", "lpx_limited_secret"


class Routers:
    """Stand for routers that accept KEY and tokens of acme; the clients of LIMITED may not list models."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.fails: Exception | None = None

    def for_caller(self, tenant: str = "", api_key: str = "") -> Any:
        self._key = api_key
        return self

    async def identity(self, *, timeout_s: float) -> tuple[str, str]:
        self.asked[self._key] += 1
        if self.fails is not None:
            raise self.fails
        if self._key == LIMITED:
            raise PermissionDeniedError("no scope")
        if self._key != KEY and not self._key.startswith("header."):
            raise UnauthenticatedError("no such key")
        if self._key == KEY:
            return "globex", "key key as trainer"
        subject = self._key.split(".")[1]
        return "acme", subject and f"{subject!r} of issuer as tenant-user"


@pytest.fixture
def routers() -> Routers:
    return Routers()


@pytest.fixture
def cluster(routers: Routers) -> Cluster:
    instance = Cluster.__new__(Cluster)
    instance._client, instance._checks_credentials, instance._holders = routers, True, {}  # type: ignore[assignment]
    return instance


def spellings() -> Iterator[Headers]:
    """Yield requests with one key that differ in what says so."""
    for scheme in ("Bearer", "bearer", "bEaReR", "BEARER"):
        for space in (" ", "  ", "   "):
            yield Headers({"authorization": f"{scheme}{space}{KEY}"})
            yield Headers({"authorization": f"{scheme}{space}{KEY}", "x-api-key": f"{KEY} "})
            yield Headers({"authorization": f"{scheme}{space}{KEY}", "x-loraplex-tenant": f"t{len(space)}"})
    for user in (f"any:{KEY}", f"{KEY}:"):
        yield Headers({"authorization": f"Basic {b64encode(user.encode()).decode()}"})


async def test_every_spelling_of_a_key_is_one_caller_whom_a_router_is_asked_about_once(
    cluster: Cluster, routers: Routers
) -> None:
    callers = {await cluster.counted_as(headers) for headers in spellings()}
    assert callers == {"tenant globex"}
    assert routers.asked == {KEY: 1}
    assert await cluster.counted_as(Headers({"x-api-key": LIMITED})) == ""


async def test_all_tokens_of_a_tenant_are_one_caller(cluster: Cluster) -> None:
    tokens = [Headers({"x-api-key": f"header.{number}.signature"}) for number in range(24)]
    unproven = {cluster.claimed(headers) for headers in tokens}
    assert len(unproven) == 24
    assert {await cluster.counted_as(headers) for headers in tokens} == {"tenant acme"}
    assert {cluster.claimed(headers) for headers in tokens} == {"tenant acme"}, "owners of conversations"


async def test_a_rotated_credential_is_its_holders_while_it_is_valid(cluster: Cluster, routers: Routers) -> None:
    old, new, other = (Headers({"x-api-key": f"header.{who}"}) for who in ("anna.1", "anna.2", "bert.1"))
    anna = await cluster.identity(old, fresh=True)
    assert anna == await cluster.identity(new) == await cluster.identity(new, fresh=True)
    assert len({anna, await cluster.identity(other), await cluster.identity(Headers({"x-api-key": KEY}))}) == 3
    nobodys = [await cluster.identity(Headers({"x-api-key": f"header..{n}"}), fresh=True) for n in (1, 2)]
    assert len({anna, *nobodys}) == 3, "no router tells whose they are"
    routers.fails = UnauthenticatedError("has ended")
    assert await cluster.identity(old) == anna  # remembered: routers refuse what it asks for
    with pytest.raises(UnauthenticatedError):
        await cluster.identity(old, fresh=True)
    routers.fails = UnavailableError("no router")
    with pytest.raises(UnavailableError):
        await cluster.identity(new, fresh=True)


async def test_made_up_keys_have_no_share_of_their_own(cluster: Cluster, routers: Routers) -> None:
    assert await cluster.counted_as(Headers({})) == ""
    assert await cluster.counted_as(Headers({"authorization": "Basic abc"})) == ""
    assert await cluster.counted_as(Headers({"authorization": "Bearer a", "x-api-key": "b"})) == ""
    for _ in range(2):
        with pytest.raises(UnauthenticatedError):
            await cluster.counted_as(Headers({"x-api-key": "made up"}))
    assert routers.asked == {"made up": 2}
    for name in ("x-api-key", "x-loraplex-tenant"):  # no router could read them
        with pytest.raises(HttpError, match="60000 characters") as caught:
            cluster.caller(Headers({name: "x" * 60_000}))
        assert caught.value.status == 401
    routers.fails = UnavailableError("no router")
    assert await cluster.counted_as(Headers({"x-api-key": KEY})) == ""


async def test_without_credentials_a_caller_is_the_tenant_alone(cluster: Cluster, routers: Routers) -> None:
    cluster._checks_credentials = False
    callers = {await cluster.counted_as(Headers({"x-loraplex-tenant": "a", "x-api-key": key})) for key in "xyz"}
    assert callers == {"tenant a"}
    assert not routers.asked


async def test_bytes_of_tokens_of_a_default_model_are_asked_for_each_caller() -> None:
    """Two callers may have other default models; one of a name is the same for both."""

    class Caller:
        def __init__(self, own: bytes) -> None:
            self.own = own

        async def models(self) -> list[Any]:
            return [SimpleNamespace(name=name, digest=name) for name in ("large", "tiny")]

        async def token_bytes(self, ids: Sequence[int], *, model: str) -> tuple[bytes, ...]:
            return tuple(model.encode() or self.own for _ in ids)

    cluster = Cluster("127.0.0.1:1", "", "")
    callers: list[Any] = [Caller(b"acme's"), Caller(b"globex's")]
    await cluster.models(callers[0])
    assert [await cluster.token_bytes(caller, "", [7]) for caller in callers] == [{7: b"acme's"}, {7: b"globex's"}]
    assert [await cluster.token_bytes(caller, "tiny", [7, 8]) for caller in callers] == [{7: b"tiny", 8: b"tiny"}] * 2
