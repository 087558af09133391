"""The names of fields in errors: LoRAX's parameters for the fields of Loraplex's own messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from loraplex_client.errors import InvalidRequestError, NotImplementedByServerError

# By the path in GenerateSpec. Other fields of its messages have their own names without the message's.
_NAMES = {
    "adapter": "adapter_id",
    "adapters": "merged_adapters",
    "json_schema": "response_format.schema",
    "output.logprobs": "return_k_alternatives",
    "prompt_options.truncate_to": "truncate",
    "stopping.ignore_eos": "ignore_eos_token",
    "stopping.max_tokens": "max_new_tokens",
    "stopping.stop": "stop_sequences",
}
_PATH = re.compile(rf"^(?:{'|'.join(map(re.escape, _NAMES))})(?![^.[])|^(?:sampling|stopping|output|prompt_options)\.")


@contextmanager
def lorax_field_names() -> Iterator[None]:
    """Raise an error of a field of Loraplex's own messages as one of LoRAX's parameter."""
    try:
        yield
    except (InvalidRequestError, NotImplementedByServerError) as error:
        field = _PATH.sub(lambda path: _NAMES.get(path[0], ""), error.field)
        message = error.message
        if field != error.field and message.startswith(error.field):
            message = field + message[len(error.field) :]
        raise type(error)(message, reason=error.reason, field=field) from error
