"""Activated LoRA (arXiv 2504.12397): an adapter that counts from its invocation in the prompt on, by its configuration.

    "alora_invocation_tokens": [49152, 4282]

As peft has it: the last occurrence of these ids in the prompt, from its first id on; what is generated is not looked
at. The keys and values before it are the base's, so that all requests after one conversation share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

from loraplex.contracts.artifacts import ArtifactError, MismatchError, parse_object

INVOCATION_FIELD = "alora_invocation_tokens"
# Maximum number of an invocation's ids: each prompt is searched for them, by one byte an id.
_MOST_IDS = 64
# Fields that change what the base computes before the invocation, or that peft does not mask there.
_EXCLUDED = ("modules_to_save", "target_parameters", "trainable_token_indices", "use_dora")


def parse_invocation(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the invocation of an adapter's configuration; empty: it is not an activated one. Raises ArtifactError."""
    ids = config.get(INVOCATION_FIELD)
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise ArtifactError(INVOCATION_FIELD, "is not a list of token ids")
    if not 0 < len(ids) <= _MOST_IDS:
        raise MismatchError(INVOCATION_FIELD, f"has {len(ids)} ids; 1 to {_MOST_IDS} are served")
    for field in _EXCLUDED:
        if config.get(field):
            raise MismatchError(INVOCATION_FIELD, f"cannot be combined with {field}; train without one of the two")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise MismatchError(INVOCATION_FIELD, "is served for task_type 'CAUSAL_LM' alone")
    return tuple(ids)


def read_invocation(config: bytes) -> tuple[int, ...]:
    """Return the invocation of an adapter_config.json that a store has checked, or of any bytes for a hash model."""
    try:
        return parse_invocation(parse_object(config, "adapter_config.json"))
    except ArtifactError:
        return ()


def check_invocation(ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise MismatchError for ids that the base does not have."""
    if ids and max(ids) >= vocab_size:
        raise MismatchError(INVOCATION_FIELD, f"{max(ids)} is not a token of the base, which has {vocab_size}")


def last_occurrence(ids: tuple[int, ...], prompt: tuple[int, ...]) -> int | None:
    """Return the position of the last occurrence of ids in a prompt; None: it has none."""
    # Encode each id as one byte: `bytes.find` takes linear time, also where a prompt repeats most of the invocation.
    codes = {token: code for code, token in enumerate(ids, 1)}
    after = bytes(map(codes.get, reversed(prompt), repeat(0))).find(bytes(codes[token] for token in reversed(ids)))
    return None if after < 0 else len(prompt) - after - len(ids)
