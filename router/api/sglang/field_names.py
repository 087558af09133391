"""The names of fields in errors: those of the engine protocol for those of Loraplex's own messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rpc.errors import InvalidField

_PARAMS = "sampling_params"
# By the beginning of the path in loraplex.inference.v1; the first one that fits.
_NAMES = {
    "inputs[0].token_ids": "tokenized.input_ids",
    "inputs": "tokenized.input_ids",
    "input": "tokenized.input_ids",
    "token_ids": "tokenized.input_ids",
    "prompt": "tokenized.input_ids",
    "adapter": "lora_id",
    "stopping.max_tokens": f"{_PARAMS}.max_new_tokens",
    "stopping.min_tokens": f"{_PARAMS}.min_new_tokens",
    "stopping": _PARAMS,
    "sampling": _PARAMS,
    "output.logprobs": "top_logprobs_num",
    "output.prompt_logprobs": "top_logprobs_num",
    "output.best_of": f"{_PARAMS}.n",
    "output": _PARAMS,
    "json_schema": f"{_PARAMS}.json_schema",
    "regex": f"{_PARAMS}.regex",
    "grammar": f"{_PARAMS}.ebnf_grammar",
}


@contextmanager
def engine_field_names() -> Iterator[None]:
    """Raise an InvalidField of Loraplex's own messages as one of the engine protocol's."""
    try:
        yield
    except InvalidField as error:
        message = error.message.removeprefix(f"{error.field}: ")
        raise InvalidField(_renamed(error.field), message, reason=error.reason) from error


def _renamed(field: str) -> str:
    for path, name in _NAMES.items():
        if field == path or field.startswith((f"{path}.", f"{path}[")):
            return name + field[len(path) :]
    return field
