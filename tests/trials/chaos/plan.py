"""The plan of a run, drawn from one seed: its requests, and its schedule of faults."""

from __future__ import annotations

import random
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from loraplex.contracts.options import RANGES, Pooling, SamplingParams, Task
from tests.hash_answers import text_of
from tests.hash_formats import FORMATS
from tests.trials.chaos.history import Pair, Request, Revision, Texts
from tests.trials.chaos.oracle import ACTIVATED, INVOCATION, truth

# Its own end is beyond most answers, so that some end by it.
MODEL = "hash:?vocab=32000&seed=1&step_ms=5&end_after=150&draft=0.6"
# The name under which it is registered.
MODEL_NAME = "hash"
TENANTS = ("acme", "globex")
# Requests of these tenants at once.
IN_FLIGHT = 16
ADAPTERS = ("a", "b", "c")


class Kind(StrEnum):
    """The faults."""

    WORKER_KILL = "worker_kill"
    ENGINE_KILL = "engine_kill"
    WORKER_HANG = "worker_hang"
    ENGINE_HANG = "engine_hang"
    ROUTER_KILL = "router_kill"
    REDIS_RESTART = "redis_restart"
    REDIS_WIPE = "redis_wipe"
    REDIS_FAILOVER = "redis_failover"
    # Each round trip takes a second, for longer than a worker's liveness key lasts.
    REDIS_SLOW = "redis_slow"
    # Redis's clock is ahead by ten minutes, and is put right.
    REDIS_CLOCK = "redis_clock"
    LINK_CUT = "link_cut"
    LINK_ONE_WAY = "link_one_way"
    LINK_DELAY = "link_delay"
    STORE_SLOW = "store_slow"
    STORE_LIES = "store_lies"
    # Between one worker and the relay of a router, or of all routers; the worker reaches Redis.
    RELAY_UNREACHABLE = "relay_unreachable"
    # Between one worker and Redis alone, for longer than its liveness key lasts.
    REDIS_UNREACHABLE = "redis_unreachable"
    REDIS_FULL = "redis_full"
    KEYS_LOST = "keys_lost"
    QUEUE_FULL = "queue_full"
    GREEDY_TENANTS = "greedy_tenants"
    BURST = "burst"
    OVERSIZE = "oversize"
    SLOW_READER = "slow_reader"
    BASE_REPLACED = "base_replaced"
    # A router that dies while the queue is full.
    ROUTER_KILL_FULL = "router_kill_full"
    # Routers that are told to stop, and started again, while requests wait in the queue.
    ROUTER_RESTART = "router_restart"
    # A store that is killed while workers fetch from it.
    STORE_KILL = "store_kill"
    # A router stands still for longer than its lease in the ledger lasts.
    ROUTER_STOP = "router_stop"
    # Routers stop and start again one after the other, and Redis loses its data when the last one has.
    RESTART_WIPE = "restart_wipe"


# Faults in which no tenant within its share of the queue may be refused.
FAIR_KINDS = frozenset({Kind.QUEUE_FULL, Kind.GREEDY_TENANTS})

# Faults in which the ledger may lose nothing, or what docs/guides/quotas.md allows.
LEDGER_KINDS = (
    *(Kind.WORKER_KILL, Kind.ENGINE_KILL, Kind.ROUTER_KILL, Kind.LINK_CUT, Kind.REDIS_SLOW),
    *(Kind.ROUTER_STOP, Kind.REDIS_WIPE, Kind.RESTART_WIPE, Kind.STORE_KILL),
)

# So often each comes in a round of a long schedule.
_OFTEN = {Kind.WORKER_KILL: 3, Kind.ENGINE_KILL: 3, Kind.WORKER_HANG: 2, Kind.ROUTER_KILL: 2}


@dataclass(frozen=True)
class PlannedFault:
    """A planned fault: `pick` chooses the victim, `hold` in [0, 1) its length, `wait_s` its start."""

    number: int
    kind: Kind
    pick: float
    hold: float
    wait_s: float


@dataclass(frozen=True)
class Plan:
    """`in_flight` requests at once; the faults one after the other, each with room for the work to go on, or not."""

    requests: int
    seed: int
    faults: tuple[PlannedFault, ...]
    overlap: bool = False
    in_flight: int = IN_FLIGHT
    # Tenants have plans, and the ledger is compared with the clients.
    ledger: bool = False
    # Tenants with the default plan then, beside others.
    tenants: int = 4_000

    @property
    def planned(self) -> dict[str, int]:
        """Count the planned faults by kind."""
        counts = Counter(fault.kind for fault in self.faults)
        return {kind.value: counts[kind] for kind in Kind}


def make_plan(  # the command's options
    requests: int,
    faults: int,
    seed: int,
    *,
    overlap: bool = False,
    kinds: Sequence[Kind] = (),
    ledger: bool = False,
) -> Plan:
    """The plan of a seed. With `kinds` only these, each as often as the others; else all, or with `ledger` its own."""
    kinds = kinds or (LEDGER_KINDS if ledger else ())
    rng = random.Random(f"faults {seed}")
    schedule: list[Kind] = []
    first = list(kinds or Kind)
    later = list(kinds) or [kind for kind in first for _ in range(_OFTEN.get(kind, 1))]
    while len(schedule) < faults:
        kinds_of_round = later if len(schedule) >= len(first) else first
        schedule += rng.sample(kinds_of_round, len(kinds_of_round))
    planned = [
        PlannedFault(number, kind, rng.random(), rng.random(), rng.uniform(0.0, 0.4))
        for number, kind in enumerate(schedule[:faults])
    ]
    return Plan(requests, seed, tuple(planned), overlap, ledger=ledger)


def make_request(seed: int, number: int, revisions: Sequence[Revision]) -> Request:
    """Request `number` of a seed, for one of these revisions."""
    rng = random.Random(f"request {seed} {number}")
    letters = string.ascii_lowercase + " "
    n = rng.choices((1, 2, 3), (75, 20, 5))[0]
    max_tokens = rng.randint(20, 200)
    request = Request(
        number=number,
        revision=rng.choice(revisions),
        prompt=f"{number} " + "".join(rng.choices(letters, k=rng.randint(1, 60))),
        max_tokens=max_tokens,
        n=n,
        best_of=n + rng.randint(0, 2) if rng.random() < 0.08 else None,
        sampling=_sampling(rng),
        logit_bias=tuple((token, rng.uniform(-5, 5)) for token in (7, 8)) if rng.random() < 0.1 else (),
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.1 else 0,
        ignore_eos=rng.random() < 0.2,
        logprobs=rng.choice((0, 1, 3)) if rng.random() < 0.2 else None,
        prompt_logprobs=rng.choice((0, 2)) if rng.random() < 0.2 else None,
        skip_special_tokens=rng.random() < 0.9,
        stream_interval=rng.choice((2, 5)) if rng.random() < 0.1 else 1,
        format=_format(random.Random(f"format {seed} {number}")),
        echo=rng.random() < 0.1,
    )
    listed = random.Random(f"allowed {seed} {number}")
    if not request.format and listed.random() < 0.08:
        allowed = tuple(sorted(listed.sample(range(32_000), listed.choice((1, 3, 50)))))
        request = msgspec.structs.replace(request, allowed_token_ids=allowed)
    elif not request.format and listed.random() < 0.1:
        # Forbid so many that some answers would have one of them.
        words = tuple(listed.sample(string.ascii_letters + string.digits, 60))
        request = msgspec.structs.replace(request, bad_words=words)
    request = msgspec.structs.replace(
        request, default_temperature=listed.random() < 0.1, keep_stop=listed.random() < 0.3
    )
    if request.logprobs is None and listed.random() < 0.08:
        named = tuple(listed.sample(range(32_000), listed.choice((1, 3, 40))))
        request = msgspec.structs.replace(request, logprob_token_ids=named)
    if listed.random() < 0.2:
        request = msgspec.structs.replace(request, logprobs_mode="processed_logprobs")
    if listed.random() < 0.3:
        request = msgspec.structs.replace(request, speculation="off")
    own = random.Random(f"prompt {seed} {number}")
    request = msgspec.structs.replace(
        request,
        add_special_tokens=own.choice((False, True)) if own.random() < 0.1 else None,
        parse_special_tokens=own.choice((False, True)) if own.random() < 0.1 else None,
        truncate_to=own.choice((0, own.randint(1, len(request.prompt) + 5))) if own.random() < 0.15 else None,
    )
    kind = own.random()
    if activated := request.revision.name == ACTIVATED:
        at = own.randint(0, len(request.prompt))
        prompt = request.prompt[:at] + INVOCATION + request.prompt[at:]
        request = msgspec.structs.replace(request, prompt=prompt, truncate_to=None)
    if kind < 0.05:
        return _score(own, request)
    if kind > 0.93 and not activated:
        return _texts(own, request)
    if kind > 0.9 and not activated:
        return _documents(own, request)
    if kind < 0.1:  # the prompt's log probabilities alone
        least = {"max_tokens": 0, "min_tokens": 0, "best_of": None, "prompt_logprobs": own.choice((0, 2))}
        return msgspec.structs.replace(request, **least)
    return _with_stop(rng, request)


def _score(rng: random.Random, request: Request) -> Request:
    """Return a call of Score for a request's prompt and adapter."""
    endings = [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 30)))
        if rng.random() < 0.5
        else tuple(rng.randrange(32_000) for _ in range(rng.randint(1, 30)))
        for _ in range(rng.choice((1, 3, 20)))
    ]
    return Request(
        request.number,
        request.revision,
        request.prompt,
        max_tokens=0,
        add_special_tokens=request.add_special_tokens,
        parse_special_tokens=request.parse_special_tokens,
        truncate_to=request.truncate_to,
        continuations=tuple(endings),
    )


def _texts(rng: random.Random, request: Request) -> Request:
    """Return a call of Embed or Classify by a request's adapter."""
    letters = string.ascii_lowercase + " "

    def text() -> str:
        return "".join(rng.choices(letters, k=rng.randint(1, 60)))

    kinds: tuple[Callable[[], str | tuple[int, ...] | Pair], ...] = (
        text,
        lambda: Pair(text(), text()),
        lambda: tuple(rng.randrange(32_000) for _ in range(rng.randint(1, 40))),
    )
    inputs = tuple(rng.choice(kinds)() for _ in range(rng.choice((1, 4, 12))))
    pooling: Pooling = rng.choice(("", "", "cls", "mean", "last"))
    task: Task = "embed" if pooling else rng.choice(("embed", "classify"))
    return Request(request.number, request.revision, "", max_tokens=0, texts=Texts(task, inputs, pooling))


def _documents(rng: random.Random, request: Request) -> Request:
    """Return a call of Rerank for a request's prompt and adapter."""
    sizes = [rng.randint(1, 60) for _ in range(rng.choice((1, 3, 20)))]
    documents = tuple("".join(rng.choices(string.ascii_lowercase, k=size)) for size in sizes)
    return Request(request.number, request.revision, request.prompt, max_tokens=0, documents=documents)


def _format(rng: random.Random) -> str:
    return rng.choice(list(FORMATS)) if rng.random() < 0.15 else ""


def _sampling(rng: random.Random) -> dict[str, float | int]:
    """Draw a seed and a temperature for six in ten, and each other parameter for one in five."""
    sampling: dict[str, float | int] = {}
    if rng.random() < 0.6:
        sampling = {"temperature": rng.uniform(0.1, 2.0), "seed": rng.getrandbits(63)}
    for name, accepted in RANGES.items():
        if name != "temperature" and rng.random() < 0.2:
            value = rng.uniform(accepted.least + 0.1, min(accepted.most, accepted.least + 4))
            sampling[name] = round(value) if isinstance(getattr(SamplingParams(), name), int) else value
    return sampling


def _with_stop(rng: random.Random, request: Request) -> Request:
    """Give three in ten a stop string or a stop token that one of their choices comes to."""
    kind = rng.random()
    if kind > 0.3:
        return request
    ids = truth(MODEL, request, rng.randrange(request.n)).uncut
    at = rng.randrange(5, len(ids) - 2)
    if kind > 0.2:
        return msgspec.structs.replace(request, stop_token_ids=(ids[at],))
    # A stop string that begins in the middle of a token: the token's beginning is delivered.
    whole = "".join(map(text_of, ids[at : at + rng.choice((1, 2, 3))]))
    return msgspec.structs.replace(request, stop=(whole[rng.choice((0, 0, 2)) :] or whole,))
