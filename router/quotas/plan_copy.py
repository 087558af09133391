"""A router's copy of the plans, which the store tells it of within a second."""

from __future__ import annotations

import logging
from dataclasses import replace

from loraplex.admin.v1 import plans_pb2 as pb

from router.catalog.store_client import StoreClient
from router.catalog.store_copies import StoreChanges
from tenancy.plans import FIELDS, WEIGHTS, Plan, is_weight

log = logging.getLogger(__name__)


class PlanCopy:
    """The plans as the store had them at the last look that it answered."""

    def __init__(self, store: StoreClient) -> None:
        self._changes = StoreChanges("plans", store.plan_changes)
        self._plans: dict[str, Plan] = {}

    async def look(self) -> dict[str, Plan] | None:
        """Take what has changed; return all plans, or None where nothing has, or where the store does not answer."""
        found = await self._changes.look()
        if found is None:
            return None
        pages, anew = found
        if not anew and not any(page.plans or page.deleted for page in pages):
            return None
        plans = {} if anew else dict(self._plans)
        for page in pages:
            plans |= {one.name: _plan(one) for one in page.plans}
            for name in page.deleted:
                plans.pop(name, None)
        self._plans = plans
        return plans


def _plan(message: pb.Plan) -> Plan:
    """Return a plan. Older stores took any weight above 0."""
    plan = Plan(**{field.name: value for field, value in message.ListFields() if field.name in FIELDS})
    if plan.weight is None or is_weight(plan.weight):
        return plan
    nearest = min(max(plan.weight, WEIGHTS[0]), WEIGHTS[1])
    log.warning("the plan %s has the weight %g; %g is taken instead", message.name, plan.weight, nearest)
    return replace(plan, weight=nearest)
