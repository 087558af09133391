"""Releases of an adapter over HTTP: their gates, figures and histories, and the changes that people make to them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Required

from google.protobuf.json_format import MessageToDict
from loraplex.adapters.v1 import releases_pb2 as pb
from typing_extensions import TypedDict

from loraplex.gateway.adapters_api import read_query
from loraplex.gateway.bodies import Body
from loraplex.gateway.endpoint import HttpCall
from loraplex.gateway.errors import invalid
from loraplex_client.calls import Call, Script

# Maximum number of releases of an answer.
_PAGE = 50
# Timeout in seconds of the store's answer, where the client gives no deadline.
_STORE_S = 10.0


class Step(TypedDict, total=False):
    """A step of a rollout; permille is a share in 1/1000."""

    permille: Required[int]
    requests: int
    seconds: int


class Rules(TypedDict, total=False):
    """The rules that end a rollout."""

    min_requests: int
    max_error_rise: float
    max_ttft_ratio: float
    max_refusal_rise: float
    min_agreement: float


class RolloutTable(TypedDict, total=False):
    """A rollout, as releases.proto has it."""

    steps: Required[list[Step]]
    rules: Rules
    shadow_permille: int
    refusal_phrases: list[str]


class ChangeRequest(TypedDict, total=False):
    """Body of a change. Without a plan, a release that is promoted is live at once."""

    action: Required[Literal["promote", "abort", "rollback"]]
    etag: Required[str]
    plan: RolloutTable | None


CHANGE = Body(ChangeRequest)
_METHODS = {
    "promote": ("PromoteRelease", pb.PromoteReleaseRequest),
    "abort": ("AbortRelease", pb.AbortReleaseRequest),
    "rollback": ("RollBackRelease", pb.RollBackReleaseRequest),
}


async def list_releases(call: HttpCall) -> None:
    """Answer with an adapter's releases, newest first, without their histories. Raises HttpError, LoraplexError."""
    token = read_query(call, ("page_token",)).get("page_token", "")
    request = pb.ListReleasesRequest(parent=call.parameters["adapter"], page_size=_PAGE, page_token=token)
    await _answer(call, Call("ListReleases", request, timeout_s=call.timeout_s or _STORE_S))


async def get_release(call: HttpCall) -> None:
    """Answer with a release and its history. Raises HttpError, LoraplexError."""
    request = pb.GetReleaseRequest(name=_name(call))
    await _answer(call, Call("GetRelease", request, timeout_s=call.timeout_s or _STORE_S))


async def change_release(call: HttpCall) -> None:
    """Promote a release, abort it or roll it back, if it is still of this etag. Raises HttpError, LoraplexError."""
    body = await call.read(CHANGE)
    method, kind = _METHODS[body["action"]]
    fields: dict[str, Any] = {"name": _name(call), "etag": body["etag"]}
    if not body["etag"]:
        raise invalid("etag", "is empty; give that of the release which the change is for")
    if (plan := body.get("plan")) is not None:
        if body["action"] != "promote":
            raise invalid("plan", "goes with the action promote alone")
        try:
            fields["plan"] = pb.RolloutPlan(**plan)
        except ValueError:
            raise invalid("plan", "has a number below 0 or above 4294967295, or a text that is not UTF-8") from None
    await _answer(call, Call(method, kind(**fields), timeout_s=call.timeout_s or _STORE_S, once=True))


def _name(call: HttpCall) -> str:
    return f"{call.parameters['adapter']}/releases/{call.parameters['number']}"


async def _answer(call: HttpCall, request: Call) -> None:
    def script() -> Script[Any]:
        return (yield request)

    message = await call.cluster.releases(call.exchange.headers).run(script())
    # A history has up to 500 events with many figures each.
    payload = await asyncio.to_thread(
        MessageToDict, message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    await call.exchange.answer(payload, headers=(("cache-control", "no-store"),))
