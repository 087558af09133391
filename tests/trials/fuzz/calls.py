"""Changes the calls of tests.trials.hostile, which reach every method of a router and a store."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from loraplex.admin.v1 import (  # noqa: F401  # adds their services to the pool
    accounts_pb2,
    grants_pb2,
    keys_pb2,
    plans_pb2,
    tenants_pb2,
)
from tests.trials.fuzz.mutations import changed_message, mutants
from tests.trials.hostile.cases import Case

# Methods that take from later calls what these need: a worker or a cell that drains answers nobody.
_LEFT_OUT = ("DrainWorker", "DrainCell")
# Maximum number of messages of a call: sending a thousand takes the sender a second.
_MESSAGES = 50


def changed_calls(cases: Sequence[Case], draw: random.Random) -> Iterator[Case]:
    """Yield calls without end, each made of one of the cases; an answer is as good as a refusal."""
    kept = [case for case in cases if 0 < len(case.messages) <= _MESSAGES and not case.method.endswith(_LEFT_OUT)]
    for number in itertools.count():
        case = draw.choice(kept)
        messages, at = list(case.messages), draw.randrange(len(case.messages))
        messages[at] = next(mutants([messages[at]], (), draw, partial(changed_message, _input_of(case.method))))
        yield replace(case, name=f"{number}, {case.name}", messages=tuple(messages), served=True)


def _input_of(method: str) -> type[Message]:
    _, service, name = method.split("/")
    found = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(name)
    return message_factory.GetMessageClass(found.input_type)
