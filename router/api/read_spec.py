"""Reading the message of a request: first its size is checked, and a large format is read in a thread."""

from __future__ import annotations

from loraplex.inference.v1 import inference_pb2 as pb

from router.api.convert import read_request
from router.api.formats import read_large_format
from router.api.prompt_size import check_prompt_size
from router.catalog.models import Models
from router.request import Request


async def read_spec(spec: pb.GenerateSpec, tenant: str, models: Models) -> Request:
    """Return the request in a message. Raises InvalidField, NotBuilt, NotFound or Unavailable."""
    check_prompt_size(spec, models.get(spec.model))
    await read_large_format(spec)
    return read_request(spec, tenant)
