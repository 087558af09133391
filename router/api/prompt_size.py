"""Checks of a message's size that come before anything of that size is made of it."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.inference.v1 import inference_pb2 as pb

from router.catalog.models import ServedModel
from router.text.prompt_encoder import check_text
from rpc.errors import InvalidField


def check_prompt_size(message: pb.GenerateSpec | pb.TokenizeRequest, model: ServedModel) -> None:
    """Raise InvalidField where the prompt can't fit the model's context, naming the field."""
    context = model.manifest.context_length
    if message.prompt_options.HasField("truncate_to"):  # a message's size is the bound
        return
    match message.WhichOneof("input"):
        case "prompt":
            check_text(model.text, message.prompt, "prompt", context)
        case "token_ids" if isinstance(message, pb.GenerateSpec):
            check_count("token_ids", message.token_ids.ids, context)
        case "chat":
            # Every template makes at least one token of a message.
            check_count("chat.messages", message.chat.messages, context)


def check_count(field: str, values: Sequence[object], limit: int) -> None:
    """Raise InvalidField where a field has more values than the context has tokens."""
    if len(values) > limit:
        message = f"{len(values)} do not fit the context of {limit} tokens"
        raise InvalidField(field, message, reason="CONTEXT_EXCEEDED")
