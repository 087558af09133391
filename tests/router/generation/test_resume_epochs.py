"""Resume tokens end with their time, with the API key of their stream, and with their adapter."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import msgspec
import pytest

from loraplex.contracts.broker.messages import AdapterRef
from loraplex.router.catalog.store_client import ResolvedAdapter
from loraplex.router.generation.resume import TOKEN_S, ResumeEpochs, ResumeKeys, ResumeTokens, key_name
from loraplex.runtime.rpc.errors import CallError, InvalidField, NotFound, Unavailable
from loraplex.runtime.rpc.principal import CredentialKind, Principal, Role, set_caller
from loraplex.runtime.tenancy.api_keys import HashedKey, KeyDirectory
from tests.router.generation.test_resume import KEY, PART, PAYLOAD, SET, same

HASHED = HashedKey("0123456789abcdef", "acme", Role.TENANT_USER, frozenset(), None, False, ())


class Store:
    """A store whose adapters are made, deleted and made again."""

    def __init__(self) -> None:
        self.epoch = 1_000
        self.error: CallError | None = None
        self.waits: asyncio.Event | None = None
        self.asked: list[tuple[str, str]] = []

    def epoch_of(self, revision: str) -> int:
        """Return the epoch."""
        return self.epoch

    async def resolve(self, tenant: str, name: str) -> ResolvedAdapter:
        """Return the adapter, unless it is gone."""
        self.asked.append((tenant, name))
        if self.waits is not None:
            await self.waits.wait()
        if self.error is not None:
            raise self.error
        return ResolvedAdapter(PART, "sha256:0", {}, self.epoch)


class Router:
    """Hold the parts with which a router verifies tokens."""

    def __init__(self) -> None:
        self.store, self.keys, self.now = Store(), KeyDirectory(), 1e9
        self.keys.put([HASHED])
        store: Any = self.store
        self.tokens = ResumeTokens(ResumeKeys(KEY), ResumeEpochs(store, self.keys, check_s=0.01), lambda: self.now)

    async def refusal(self, token: str) -> str:
        """Return the reason for which a token is refused; empty for none."""
        try:
            await self.tokens.verify(token, "acme")
        except InvalidField as error:
            return error.reason
        return ""


@pytest.fixture
def router() -> Router:
    """A router."""
    return Router()


def token_with_key(router: Router, adapter: AdapterRef | None = PART) -> str:
    """Return a token of a stream that was called with the API key."""
    principal = Principal("a", frozenset({Role.TENANT_USER}), CredentialKind.API_KEY, "acme", key_id=HASHED.key_id)
    set_caller(principal)
    return router.tokens.sign(msgspec.structs.replace(PAYLOAD, adapter=adapter), "acme")


async def test_a_token_expires(router: Router) -> None:
    token = router.tokens.sign(PAYLOAD, "acme")
    router.now += TOKEN_S - 1
    assert await router.refusal(token) == ""
    router.now += 1
    assert await router.refusal(token) == "RESUME_TOKEN_EXPIRED"


@pytest.mark.parametrize("how", ["revoked", "expired", "gone"])
async def test_a_token_ends_with_the_key_of_its_stream(router: Router, how: str) -> None:
    token = token_with_key(router)
    assert (await router.tokens.verify(token, "acme")).api_key == HASHED.key_id
    if how == "gone":
        router.keys.put([], clear=True)
    else:
        change: dict[str, Any] = {"revoked": True} if how == "revoked" else {"expires_at": time.time() - 1}
        router.keys.put([dataclasses.replace(HASHED, **change)])
    assert await router.refusal(token) == "RESUME_TOKEN_ENDED"


@pytest.mark.parametrize("kind", [CredentialKind.JWT, CredentialKind.CERTIFICATE])
async def test_a_token_of_another_credential_is_good_for_every_caller_of_its_tenant(
    router: Router, kind: CredentialKind
) -> None:
    first, second = (Principal(name, frozenset({Role.TENANT_USER}), kind, "acme") for name in ("a", "b"))
    set_caller(first)
    token = router.tokens.sign(PAYLOAD, "acme")
    set_caller(second)
    assert await router.refusal(token) == ""
    with pytest.raises(InvalidField, match="to this tenant"):
        await router.tokens.verify(token, "globex")


@pytest.mark.parametrize("adapter", [PART, SET])
async def test_a_token_ends_with_its_adapter_even_if_it_is_made_again(router: Router, adapter: AdapterRef) -> None:
    token = token_with_key(router, adapter)
    assert await router.refusal(token) == ""
    assert router.store.asked[-1] == ("acme", "tenants/acme/adapters/a@sha256:1")
    router.store.error = NotFound("adapter", "a")
    assert await router.refusal(token) == "RESUME_TOKEN_ENDED"
    router.store.error, router.store.epoch = None, 2_000
    assert await router.refusal(token) == "RESUME_TOKEN_ENDED"


async def test_a_token_of_the_base_model_asks_for_no_adapter(router: Router) -> None:
    router.store.error = NotFound("adapter", "a")
    assert await router.refusal(token_with_key(router, None)) == ""


async def test_a_store_that_is_away_or_slow_does_not_end_answers(router: Router) -> None:
    token = token_with_key(router)
    router.store.error = Unavailable("away")
    assert await router.refusal(token) == ""
    router.store.error, router.store.waits = None, asyncio.Event()
    assert await router.refusal(token) == ""


async def test_a_resumed_stream_has_the_epochs_of_the_first(router: Router) -> None:
    payload = await router.tokens.verify(token_with_key(router), "acme")
    another = Router()
    another.store.epoch = 0  # it has never resolved the adapter
    token = another.tokens.sign(payload, "acme")
    assert (await router.tokens.verify(token, "acme")).epochs == (1_000,)


class Looks(ResumeKeys):
    """Counts looks at Redis."""

    looks = 0

    async def look(self) -> None:
        """Count."""
        self.looks += 1


async def test_a_token_says_which_key_signed_it_and_a_forged_one_costs_no_look() -> None:
    keys = Looks(KEY)
    tokens = ResumeTokens(keys)
    token = tokens.sign(PAYLOAD, "acme")
    found = await tokens.verify(token, "acme")
    assert same(found, PAYLOAD)
    assert found.signed_by == key_name(KEY)
    assert KEY not in token
    with pytest.raises(InvalidField):
        await tokens.verify(token, "globex")
    assert keys.looks == 0
    with pytest.raises(InvalidField):
        await tokens.verify(ResumeTokens(ResumeKeys()).sign(PAYLOAD, "acme"), "acme")
    assert keys.looks == 1
