"""Every failure that a worker ends a job with reaches the client with its own code, reason, message and field."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import grpc
import pytest
from google.rpc import error_details_pb2 as details_pb2

from loraplex import worker
from loraplex.relay.v1 import relay_pb2
from loraplex.router.dispatch.links import read_frame
from loraplex.runtime.rpc.status import to_status
from loraplex.worker.engine_api import Failure, FailureCode, FailureReason
from loraplex.worker.io.local_jobs import Ending, LocalJobs
from loraplex.worker.io.relay.frames import add_frame
from tests.router.recording_link import job

CODES, REASONS = get_args(FailureCode), get_args(FailureReason)


SOURCES = sorted(Path(next(iter(worker.__path__))).rglob("*.py"))


def constructed() -> Iterator[tuple[str, str, str]]:
    """Yield code, reason and field of every Failure that the worker's source makes; for a variable all its values."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Failure":
                given = dict(zip(("code", "reason", "message", "field"), node.args, strict=False))
                given |= {keyword.arg or "": keyword.value for keyword in node.keywords}
                field = given.get("field", ast.Constant(""))
                fields = [field.value] if isinstance(field, ast.Constant) else ["prompt_ids"]
                yield from product(_values(given["code"], CODES), _values(given["reason"], REASONS), fields)


def _values(node: ast.expr, otherwise: tuple[str, ...]) -> tuple[str, ...]:
    return (str(node.value),) if isinstance(node, ast.Constant) else otherwise


FAILURES = sorted(set(constructed()))


def test_every_reason_of_the_vocabulary_is_used() -> None:
    source = "".join(path.read_text() for path in SOURCES if path.name != "engine_api.py")
    assert [reason for reason in REASONS if f'"{reason}"' not in source] == []


@pytest.mark.parametrize("field", ["", "adapter"])
@pytest.mark.parametrize("code", CODES)
def test_every_code_has_its_own_status(code: FailureCode, field: str) -> None:
    check(Failure(code, "OUT_OF_MEMORY", "a message", field))


def test_every_failure_of_the_worker_s_source_reaches_the_client() -> None:
    for code, reason, field in FAILURES:
        check(Failure(code, reason, "a message", field))  # type: ignore[arg-type]  # read from the source


def check(failure: Failure) -> None:
    """Send a failure over the relay and compare the status that the client gets."""
    choice = LocalJobs().add(job()).choices[0]
    choice.end(Ending(failure=failure))
    error = read_frame(add_frame(choice, relay_pb2.FrameBatch())).failure
    assert error is not None
    code, status = to_status(error)
    assert code is grpc.StatusCode[failure.code]
    assert failure.message in status.message
    info = details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == failure.reason
    subject, name = named(status.details[1:])
    assert subject in {None, failure.field or "request"}
    # A resource's name must never be empty: it is what the message of the failure names.
    assert name in {None, failure.message}


def named(details: Iterable[Any]) -> tuple[str | None, str | None]:
    """Return the field or subject that a status's details name, and the resource."""
    request, failed, quota = details_pb2.BadRequest(), details_pb2.PreconditionFailure(), details_pb2.QuotaFailure()
    resource = details_pb2.ResourceInfo()
    for detail in details:
        if detail.Unpack(request):
            return request.field_violations[0].field, None
        if detail.Unpack(failed):
            return failed.violations[0].subject, None
        if detail.Unpack(quota):
            return quota.violations[0].subject, None
        if detail.Unpack(resource):
            return resource.resource_type, resource.resource_name
    return None, None
