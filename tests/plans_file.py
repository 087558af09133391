"""Plans as the text of a TOML file: [default], [tenants.NAME] and [keys.KEYID], without a store or at one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import grpc

from loraplex.admin.v1 import plans_pb2, plans_pb2_grpc
from loraplex.contracts.plans import DEFAULT, PRICES, Plan, Price, Prices, make_plan
from loraplex.router.quotas.plans import Plans

_KINDS = ("input", "cached", "output")


def read_plans(text: str) -> dict[str, Plan]:
    """Return plans by name; a line of [prices] is a model's, in nano-units of a token: [input, cached, output]."""
    tables = tomllib.loads(text)
    of = {model: Price(*price) for model, price in tables.pop(PRICES, {}).items()}
    prices = {PRICES: Plan(prices=Prices("EUR", of))} if of else {}
    named = {DEFAULT: tables.pop(DEFAULT, {})}
    named |= {f"{kind}/{name}": table for kind, of_kind in tables.items() for name, table in of_kind.items()}
    return {**prices, **{name: make_plan(name, table) for name, table in named.items()}}


def plans_in(path: Path) -> Plans:
    """Return a router's plans, out of a file."""
    plans = Plans()
    plans.put(read_plans(path.read_text()))
    return plans


async def set_plans(store: str, text: str) -> None:
    """Set plans at the store of this address, which takes calls without credentials."""
    async with grpc.aio.insecure_channel(store) as channel:
        stub: plans_pb2_grpc.PlanServiceAsyncStub = plans_pb2_grpc.PlanServiceStub(channel)
        named = tomllib.loads(text)
        if of := {name: dict(zip(_KINDS, price, strict=True)) for name, price in named.pop(PRICES, {}).items()}:
            prices = plans_pb2.Prices(currency="EUR", of={name: plans_pb2.Price(**one) for name, one in of.items()})
            await stub.SetPlan(plans_pb2.SetPlanRequest(plan=plans_pb2.Plan(name=PRICES, prices=prices)))
        for kind, tables in named.items():
            for name, limits in {kind: tables}.items() if kind == DEFAULT else tables.items():
                plan = plans_pb2.Plan(name=name if kind == DEFAULT else f"{kind}/{name}", **limits)
                await stub.SetPlan(plans_pb2.SetPlanRequest(plan=plan))
