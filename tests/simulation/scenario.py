"""The scenario of a seed: the cluster, its clients' requests with the model's answers to them, and its faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from loraplex.contracts.artifacts.hash_model import parse_hash_model
from loraplex.contracts.artifacts.names import sha256_json
from loraplex.contracts.broker.messages import AdapterRef
from loraplex.contracts.broker.terms import SEALED_JOB_S, QueueLimits
from loraplex.contracts.options import SamplingParams
from loraplex.router.request import Request, Stopping
from tests.hash_answers import expected_answers, expected_scores
from tests.simulation.acts import draw_acts, draw_drain
from tests.simulation.charges import draw_keys, draw_quotas
from tests.simulation.faults import (
    Fault,
    draw_clock,
    draw_faults,
    draw_older,
    draw_outage,
    draw_restart,
    draw_restart_wipe,
    draw_slow,
    draw_stop,
    draw_store,
    draw_throttle,
    draw_wipe,
)
from tests.simulation.options import asked_of, draw_activated, draw_options, prompt_ids_of
from tests.simulation.stories import Plan
from tests.simulation.texts import draw_texts

MODEL = "hash:?vocab=1000&seed=1&context=256&end_after=40"
# Drafts of the same model guess six tokens in ten right.
DRAFTING = f"{MODEL}&draft=0.6"
# Of a backlog's requests the first tenant's.
_FIRST, _BACKLOG = 25, 40


@dataclass(frozen=True)
class Scenario:
    """The cluster, requests and faults that a seed stands for."""

    seed: int
    workers: int
    routers: int
    rows: int
    kv_blocks: int
    adapters: Mapping[str, AdapterRef]
    plans: tuple[Plan, ...]
    faults: tuple[Fault, ...]
    # All requests come at once, from two tenants, so that their shares can be compared.
    backlog: bool
    limits: QueueLimits
    # Time in seconds for which a job's seal is valid.
    seal_s: float = SEALED_JOB_S
    # Plans of tenants and API keys, as the text of a plans file; empty: nobody has one.
    quotas: str = ""
    # Cells, each with a Redis; the workers are in them in turns.
    cells: int = 1
    # Accounts of others that the store has.
    accounts: int = 0
    # The workers' model: with drafts or without.
    model: str = MODEL


def draw(seed: int) -> Scenario:
    """The scenario of a seed; every fourth is a backlog."""
    chance, backlog = Random(f"scenario {seed}"), seed % 4 == 3
    workers, routers = (chance.randint(1, 2), 1) if backlog else (chance.randint(1, 4), chance.randint(1, 2))
    adapters = {
        name: AdapterRef(f"tenants/one/adapters/{name}@1", sha256_json(name), 8, 100_000) for name in ("a", "b", "c")
    }
    # Options have a chance of their own: another one leaves the rest of a scenario as it is.
    options = Random(f"options {seed}")
    plans = [
        _plan(chance, options, number, routers, adapters, backlog=backlog)
        for number in range(_BACKLOG if backlog else 12)
    ]
    quotas = ""
    if seed % 3 == 1:
        plans = draw_keys(Random(f"keys {seed}"), plans)
        quotas = draw_quotas(Random(f"quotas {seed}"), plans)
    acts = [] if backlog else draw_acts(Random(f"acts {seed}"), 3.5, len({plan.key for plan in plans if plan.key}))
    own = Random(f"an outage {seed}")
    outage = draw_outage(own, 3.0, routers) if quotas and not backlog and own.random() < 0.15 else []
    own = Random(f"what the ledger loses {seed}")
    if quotas and not backlog and own.random() < 0.5:
        kind = own.randrange(3)
        outage += [[draw_stop(own, 3.0, routers)], draw_restart_wipe(own, 3.0, routers), draw_store(own, 3.0)][kind]
    own = Random(f"a slow Redis {seed}")
    ahead = Random(f"a clock ahead {seed}")
    clock = [draw_clock(ahead, 3.0)] if not backlog and not quotas and ahead.random() < 0.15 else []
    slow = [draw_slow(own, 3.0)] if not backlog and own.random() < 0.15 else []
    own = Random(f"a restart {seed}")
    restart = draw_restart(own, 2.0, routers) if own.random() < 0.15 else []
    count = chance.choice((0, 0, 1)) if backlog else chance.choice((0, 1, 1, 2, 2, 3, 4, 6))
    own = Random(f"cells {seed}")
    cells = 2 if not backlog and workers > 1 and own.random() < 0.4 else 1
    drain = draw_drain(own, 3.0) if cells > 1 and own.random() < 0.5 else []
    wipe = draw_wipe(Random(f"wipe {seed}")) if backlog and not count else []
    older = draw_older(Random(f"an older Redis {seed}"))
    throttle = draw_throttle(Random(f"throttle {seed}"), workers)
    return Scenario(
        seed=seed,
        workers=workers,
        routers=routers,
        rows=2 if backlog else chance.choice((2, 4, 8)),
        kv_blocks=chance.choice((20, 40, 100)),
        adapters=adapters,
        plans=tuple(plans),
        faults=(
            *draw_faults(chance, count, 3.0, workers, routers),
            *restart,
            *outage,
            *older,
            *throttle,
            *slow,
            *clock,
            *acts,
            *wipe,
            *drain,
        ),
        backlog=backlog,
        # In every fifth the queue is soon full: newcomers are refused, or displaced, and what has begun is not.
        limits=QueueLimits(jobs=3, tenant_jobs=2) if seed % 5 == 2 and not backlog else QueueLimits(),
        seal_s=Random(f"seals {seed}").choice((SEALED_JOB_S, 1.0)),
        quotas=quotas,
        cells=cells,
        accounts=2_500 if quotas and Random(f"accounts {seed}").random() < 0.1 else 0,
        model=Random(f"drafts {seed}").choice((MODEL, DRAFTING)),
    )


def _plan(
    chance: Random,
    options: Random,
    number: int,
    routers: int,
    adapters: Mapping[str, AdapterRef],
    *,
    backlog: bool,
) -> Plan:
    prompt = tuple(chance.randrange(1000) for _ in range(chance.randint(1, 60)))
    adapter = chance.choice(("", *adapters))
    n = 1 if backlog else chance.choice((1, 1, 1, 3))
    warm = chance.random() < 0.3
    sampling = SamplingParams(temperature=0.5, top_k=5, repetition_penalty=1.5) if warm else SamplingParams()
    most = chance.randint(1, 12) if backlog else chance.choice((1, 5, 20, 60))
    request = Request(
        # Of a backlog the first tenant's come before all others.
        tenant="two" if backlog and number >= _FIRST else "one" if backlog else ("one", "two", "three")[number % 3],
        prompt=prompt,
        prompt_field="token_ids",
        request_id=f"r{number}",
        fingerprint=f"f{number}",
        adapter=adapter,
        sampling=sampling,
        seed=number,
        stopping=Stopping(max_tokens=most),
        n=n,
        best_of=n,
        priority=chance.choice((0, 0, 5)),
    )
    digest = adapters[adapter].digest if adapter else ""
    request = draw_activated(Random(f"activated {number} {prompt}"), request)
    request = draw_options(options, request, digest, MODEL, candidates=not backlog)
    plan = Plan(
        request,
        expected_answers(MODEL, asked_of(request, digest)),
        start_s=1.0 + (number * 0.001 if backlog else chance.uniform(0.0, 3.0)),
        router=chance.randrange(routers),
        cancel_after=None if backlog or chance.random() < 0.85 else chance.randint(0, most),
        deadline_s=None if backlog or chance.random() < 0.9 else chance.uniform(0.05, 6.0),
    )
    return plan if backlog else _maybe_texts(_maybe_score(plan, Random(f"score {number} {prompt}")), adapters)


def _maybe_texts(plan: Plan, adapters: Mapping[str, AdapterRef]) -> Plan:
    """Make one in eight plans a call of Embed or Classify, with the same tenant, adapter and times."""
    own = Random(f"texts {plan.request.request_id} {plan.request.prompt}")
    if plan.scores or plan.request.adapter == "checks" or own.random() >= 1 / 8:
        return plan
    texts = draw_texts(own, plan.request, adapters, MODEL, parse_hash_model(MODEL).context)
    leave_s = own.uniform(0.05, 1.0) if texts.leaves else plan.deadline_s
    return replace(plan, cancel_after=None, deadline_s=leave_s, texts=texts)


def _maybe_score(plan: Plan, own: Random) -> Plan:
    """Make one in eight plans a call of Score, with the same prompt, adapter and times."""
    if own.random() >= 1 / 8:
        return plan
    old, count = plan.request, own.choice((1, 2, 4, 12))
    request = Request(
        old.tenant,
        old.prompt,
        old.prompt_field,
        old.request_id,
        fingerprint=old.fingerprint,
        adapter=old.adapter,
        prompt_options=old.prompt_options,
        priority=old.priority,
        allow_inactive=old.allow_inactive,
    )
    endings = [[own.randrange(1000) for _ in range(own.randint(1, 9))] for _ in range(count)]
    return replace(
        plan, request=request, cancel_after=None, scores=expected_scores(MODEL, prompt_ids_of(request), endings)
    )
