"""Test the room that one tenant's pins and warms leave to others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.contracts.broker.commands import Verb
from loraplex.contracts.broker.messages import AdapterRef, AdapterRequest
from loraplex.router.api.cluster import PIN_TENANTS, WARMS, AdapterCommands
from loraplex.router.catalog.models import Living
from loraplex.router.catalog.store_client import Manifest, ResolvedAdapter
from loraplex.runtime.rpc.errors import Exhausted, Mismatch, Unavailable

BASE = "sha256:base"


class Pins:
    """The pins of a queue, in memory."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, str], AdapterRequest] = {}

    async def pin(self, request: AdapterRequest) -> None:
        self.all[request.adapter.digest, request.tenant] = request

    async def list(self) -> list[AdapterRequest]:
        return list(self.all.values())


class Store:
    """A store in which every name is an adapter."""

    async def resolve(self, tenant: str, name: str) -> ResolvedAdapter:
        owner = "shared" if name == "shared" else tenant
        return ResolvedAdapter(AdapterRef(f"{owner}/{name}", f"sha256:{owner}-{name}", 1, 1), BASE)


def commands_of(slots: int) -> tuple[AdapterCommands, Pins]:
    """Return the commands of a router whose one worker has so many adapter slots."""

    async def ignore(*_: Any) -> None:
        pass

    pins = Pins()
    manifest = Manifest("m", BASE, "hash", 64, 256, {})
    cell: Any = SimpleNamespace(name="main", queue=SimpleNamespace(pins=pins, commands=SimpleNamespace(send=ignore)))
    model: Any = SimpleNamespace(manifest=manifest, cells={"main": cell})
    state: Any = SimpleNamespace(worker_id="w", incarnation="w1", base_digest=BASE, max_rank=64, slots_total=slots)

    async def living() -> Living:
        return Living([(model, cell, state)])

    models: Any = SimpleNamespace(
        served=[model], living=living, revisions=lambda name: [model], reached=lambda model: [cell]
    )
    store: Any = Store()
    return AdapterCommands(models, store), pins


async def pin_all(commands: AdapterCommands, tenant: str) -> int:
    """Pin adapters until one is refused; return how many were pinned."""
    for number in range(100):
        try:
            await commands.send(Verb.PIN, tenant, f"a{number}", "")
        except Mismatch:
            return number
    return 100


async def test_a_tenant_pins_no_more_than_it_leaves_to_others() -> None:
    commands, pins = commands_of(slots=32)
    assert [await pin_all(commands, tenant) for tenant in ("a", "b", "c")] == [16, 8, 4]
    await commands.send(Verb.PIN, "a", "a0", "")  # the same again is no more
    assert len(pins.all) == 28
    with pytest.raises(Mismatch, match="a has pinned 16 adapters, and 3 more can be pinned") as caught:
        await commands.send(Verb.PIN, "a", "new", "")
    assert caught.value.reason == "SLOTS_SHARED"


async def test_the_tenants_that_pin_the_same_bytes_are_bounded() -> None:
    commands, pins = commands_of(slots=2)
    for number in range(PIN_TENANTS):
        await commands.send(Verb.PIN, f"t{number}", "shared", "")
    with pytest.raises(Mismatch) as caught:
        await commands.send(Verb.PIN, "one more", "shared", "")
    assert caught.value.reason == "PIN_SHARED"
    await commands.send(Verb.PIN, "t0", "shared", "")
    assert len(pins.all) == PIN_TENANTS


async def test_one_slot_can_be_pinned() -> None:
    commands, _ = commands_of(slots=2)
    assert await pin_all(commands, "a") == 1


async def test_a_tenants_warms_are_bounded_and_others_go_on() -> None:
    commands, _ = commands_of(slots=32)
    for number in range(WARMS):
        await commands.send(Verb.WARM, "a", f"a{number}", "")
    with pytest.raises(Exhausted) as caught:
        await commands.send(Verb.WARM, "a", "one more", "")
    assert caught.value.reason == "WARMS_FULL"
    assert 0 < (caught.value.retry_after_s or 0) <= 30
    await commands.send(Verb.WARM, "b", "first", "")


async def test_a_pin_is_refused_while_a_cell_is_away_which_would_not_have_it() -> None:
    commands, pins = commands_of(slots=4)
    models: Any = commands._models
    models.reached = lambda model: []
    for verb in (Verb.PIN, Verb.UNPIN):
        with pytest.raises(Unavailable, match="Redis of cell main does not answer"):
            await commands.send(verb, "a", "a0", "")
    assert not pins.all
