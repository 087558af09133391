"""A router's copy of the plans, which the store tells it of within a second."""

from __future__ import annotations

import logging

from loraplex.admin.v1 import plans_pb2 as pb

from artifacts.plans import FIELDS, Plan
from router.catalog.store_client import StoreClient
from rpc.errors import CallError

log = logging.getLogger(__name__)


class PlanCopy:
    """The plans as the store had them at the last look that it answered."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._epoch, self._latest = "", 0
        self._plans: dict[str, Plan] = {}
        self._last_logged = ""

    async def look(self) -> dict[str, Plan] | None:
        """Take what has changed; return all plans, or None where nothing has, or where the store does not answer."""
        plans, epoch, latest = dict(self._plans), self._epoch, self._latest
        try:
            while True:
                answer = await self._store.plan_changes(epoch, latest)
                if answer.epoch != epoch:
                    plans = {}
                plans |= {one.name: _plan(one) for one in answer.plans}
                for name in answer.deleted:
                    plans.pop(name, None)
                epoch, latest = answer.epoch, answer.latest
                if not answer.more:
                    break
        except CallError as error:
            if error.message != self._last_logged:
                log.warning("plans: %s", error.message)
            self._last_logged = error.message
            return None
        self._last_logged = ""
        if (epoch, latest) == (self._epoch, self._latest):
            return None
        self._epoch, self._latest, self._plans = epoch, latest, plans
        return plans


def _plan(message: pb.Plan) -> Plan:
    return Plan(**{field.name: value for field, value in message.ListFields() if field.name in FIELDS})
