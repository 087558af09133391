"""Prices of tokens, in units of a currency for a million of them, in a YAML file; and what such files are made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from loraplex.cli.terminal import CommandError
from loraplex.contracts.plans import Price, Prices, check_prices
from loraplex.runtime.rpc.errors import InvalidField

if TYPE_CHECKING:
    from loraplex.admin.v1 import plans_pb2

# Nano-units for a token that are a unit of the currency for a million tokens.
_PER_MILLION = 1_000
_KINDS = ("input", "cached", "output")


def read_prices(value: Any) -> Prices:
    """Read the prices of a file. Raises CommandError, which names the field."""
    fields = mapping(value, "prices", {"currency", "models", "adapters"})
    if "currency" not in fields:
        raise CommandError("prices.currency: name the unit of the prices, such as EUR")
    of = {
        name: _price(f"prices.{part}.{name}", price)
        for part in ("models", "adapters")
        for name, price in mapping(fields.get(part), f"prices.{part}").items()
    }
    try:
        return check_prices(Prices(str(fields["currency"]), of))
    except InvalidField as error:
        raise CommandError(error.message) from error


def _price(at: str, value: Any) -> Price:
    fields = mapping(value, at, _KINDS)
    for kind in ("input", "output"):
        if kind not in fields:
            raise CommandError(f"{at}.{kind}: missing; give the price of a million tokens, 0 where they are free")
    nanos = {kind: _nanos(f"{at}.{kind}", amount) for kind, amount in fields.items()}
    return Price(nanos["input"], nanos.get("cached", nanos["input"]), nanos["output"])


def _nanos(at: str, amount: Any) -> int:
    if isinstance(amount, bool) or not isinstance(amount, (int, float)):
        raise CommandError(f"{at}: {amount!r} is not a number")
    exact = Decimal(repr(amount)) * _PER_MILLION
    if not exact.is_finite() or exact % 1:
        raise CommandError(f"{at}: {amount} has more than 3 decimals, of the price of a million tokens")
    return int(exact)


def prices_to_pb(prices: Prices) -> plans_pb2.Prices:
    """Return prices as the store takes them."""
    from loraplex.admin.v1 import plans_pb2

    of = {name: plans_pb2.Price(**asdict(price)) for name, price in prices.prices.items()}
    return plans_pb2.Prices(currency=prices.currency, of=of)


def price_rows(prices: plans_pb2.Prices) -> dict[str, dict[str, float]]:
    """Return the prices of a million tokens in units of the currency, by name."""
    named = sorted(prices.of.items())
    return {name: {kind: getattr(price, kind) / _PER_MILLION for kind in _KINDS} for name, price in named}


def load_yaml(text: str) -> Any:
    """Parse YAML; raises YAMLError for a key that stands twice in a mapping, of which PyYAML would take the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = set[str]()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # PyYAML refuses it
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} is written twice; keep one of them", key.start_mark
                    )
                names.add(key.value)
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)


def mapping(value: Any, at: str, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return a mapping with texts as keys, of these names only; nothing is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CommandError(f"{at}: write NAME: VALUE lines")
    for name in value:
        if not isinstance(name, str):
            raise CommandError(f"{at}.{name}: write the name in quotes")
        if names is not None and name not in names:
            raise CommandError(f"{at}.{name}: not known; known are {', '.join(sorted(names))}")
    return value
