"""Reading the message of a request: first its size is checked; large ones are read in turns of the tenants."""

from __future__ import annotations

from loraplex.inference.v1 import inference_pb2 as pb

from router.api.convert import read_request
from router.api.formats import is_large_format, read_format
from router.api.prompt_size import check_prompt_size
from router.catalog.models import Models
from router.request import Request
from router.text.prompt_encoder import PromptEncoder


async def read_spec(spec: pb.GenerateSpec, tenant: str, models: Models, encoder: PromptEncoder) -> Request:
    """Return the request in a message. Raises InvalidField, NotBuilt, NotFound or Unavailable."""
    check_prompt_size(spec, models.get(spec.model))
    if is_large_format(spec):  # read_request then knows it
        await encoder.in_turn(tenant, lambda: read_format(spec, tenant))
    return await encoder.run(tenant, len(spec.token_ids.ids), lambda: read_request(spec, tenant))
