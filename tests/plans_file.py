"""A router's plans out of a file, without a store that reads it."""

from __future__ import annotations

from pathlib import Path

from loraplex.contracts.plans import PlansFile
from loraplex.router.quotas.quotas import Plans


def plans_in(path: Path) -> Plans:
    """Return the plans of a file."""
    plans = Plans()
    plans.put(PlansFile(path).content)
    return plans
