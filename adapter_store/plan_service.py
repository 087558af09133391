"""PlanService over gRPC: operators read and change plans, routers read what has changed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
from loraplex.admin.v1 import plans_pb2 as pb
from loraplex.admin.v1 import plans_pb2_grpc

from adapter_store.convert import check_key_id, refusals
from adapter_store.pages import decode_token, encode_token, page_size
from adapter_store.plans import NamedPlan, StoredPlans
from artifacts.names import check_tenant
from artifacts.plans import DEFAULT, FIELDS, Plan, PlanFieldError, make_plan
from rpc.errors import InvalidField
from rpc.identity.principal import caller

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
# Number of plans in an answer to a router.
_CHANGES = 1_000


class PlanService(plans_pb2_grpc.PlanServiceServicer):
    """Serves loraplex.admin.v1.PlanService."""

    def __init__(self, plans: StoredPlans) -> None:
        self._plans = plans

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.GetPlanResponse:
        """Return a plan."""
        return pb.GetPlanResponse(plan=_to_pb(self._plans.get(request.name)))

    async def SetPlan(self, request: pb.SetPlanRequest, context: Context) -> pb.SetPlanResponse:
        """Replace a plan, or make it."""
        name, plan = _named(request.plan.name), _from_pb(request.plan)
        kept = await asyncio.to_thread(self._plans.set, name, plan, request.plan.etag)
        log.info("%s: set the plan %s", caller().name, name)
        return pb.SetPlanResponse(plan=_to_pb(kept))

    async def ListPlans(self, request: pb.ListPlansRequest, context: Context) -> pb.ListPlansResponse:
        """Return a page of plans, in order of name."""
        size = page_size(request.page_size)
        found = self._plans.page(decode_token(request.page_token, first=("",))[0], size + 1)
        token = encode_token((found[size - 1].name,)) if len(found) > size else ""
        return pb.ListPlansResponse(plans=map(_to_pb, found[:size]), next_page_token=token)

    async def DeletePlan(self, request: pb.DeletePlanRequest, context: Context) -> pb.DeletePlanResponse:
        """Remove a plan."""
        await asyncio.to_thread(self._plans.delete, request.name, request.etag)
        log.info("%s: deleted the plan %s", caller().name, request.name)
        return pb.DeletePlanResponse()

    async def ListPlanChanges(self, request: pb.ListPlanChangesRequest, context: Context) -> pb.ListPlanChangesResponse:
        """Return the plans that have changed since the last call."""
        epoch = self._plans.epoch  # a purge may begin another one meanwhile, of which this answer is not
        after = request.after if request.epoch == epoch else 0
        found = self._plans.changes(after, _CHANGES + 1)
        plans = found[:_CHANGES]
        return pb.ListPlanChangesResponse(
            epoch=epoch,
            latest=plans[-1].change if plans else after,
            more=len(found) > _CHANGES,
            plans=[_to_pb(one) for one in plans if one.plan is not None],
            deleted=[one.name for one in plans if one.plan is None],
        )


def _named(name: str) -> str:
    """Return the name of a plan that may be set. Raises InvalidField."""
    kind, _, of = name.partition("/")
    if name != DEFAULT and kind not in {"tenants", "keys"}:
        raise InvalidField("plan.name", f"{name!r} is not default, tenants/TENANT or keys/KEYID")
    if kind == "tenants":
        with refusals("plan.name"):
            check_tenant(of)
    if kind == "keys":
        check_key_id("plan.name", of)
    return name


def _from_pb(message: pb.Plan) -> Plan:
    try:
        fields = {field.name: value for field, value in message.ListFields() if field.name in FIELDS}
        return make_plan(fields)
    except PlanFieldError as error:
        raise InvalidField(f"plan.{error.field}", error.message) from error


def _to_pb(named: NamedPlan) -> pb.Plan:
    message = pb.Plan(name=named.name, etag=named.etag)
    for field in FIELDS:
        if (value := getattr(named.plan, field)) is not None:
            setattr(message, field, value)
    return message
