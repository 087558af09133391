"""Reading of the options that say how a prompt becomes ids."""

from __future__ import annotations

from loraplex.inference.v1 import inference_pb2 as pb

from router.request import PromptOptions
from rpc.errors import InvalidField


def read_prompt_options(message: pb.GenerateSpec | pb.TokenizeRequest) -> PromptOptions:
    """Return the options of a message. Raises InvalidField."""
    given = {field.name: value for field, value in message.prompt_options.ListFields()}
    if message.WhichOneof("input") == "token_ids":
        for name in ("add_special_tokens", "parse_special_tokens"):
            if name in given:
                raise InvalidField(f"prompt_options.{name}", "concerns texts; token_ids are taken as they are")
    return PromptOptions(**given)
