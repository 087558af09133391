"""The content of each request: a function of the seed and the request's number, the same in every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loraplex.loadtest.draws import BASE, Whole
from loraplex.loadtest.plan import LoadPlan, TraceRow

# Text whose token ids prompts are built from, so that the ids exist in any model's vocabulary.
WORDS = (
    "Once upon a time there was a small town by the river where people wrote letters to each other about the weather, "
    "the harvest, new machines, old songs, the price of bread and 1234567890 other things that kept them busy: a list "
    "of names; a question? An answer! def return import for while if else { } [ ] ( ) = + - * / customers orders dates"
)

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request. `tenant` and `adapter` are indices into the workload's lists; `adapter` None is the base model.

    A request has either a `prompt` or a number of `prompt_tokens`.
    """

    index: int
    tenant: int
    adapter: int | None
    prompt: str | None
    prompt_tokens: int
    answer_tokens: int
    deadline_s: float | None
    cancel_after: int | None


class Workload:
    """Draws requests in blocks, each with a generator of its own, so that every process draws the same n-th request."""

    def __init__(self, plan: LoadPlan) -> None:
        self.tenants = plan.tenants
        self._seed = plan.seed
        self._trace = plan.trace
        weights = np.asarray([tenant.weight for tenant in plan.tenants])
        self._weights = weights / weights.sum()
        self._numbers = {tenant.name: number for number, tenant in enumerate(plan.tenants)}
        # (tenant's number, adapter's name), in the order of the plan, then of the trace.
        self.adapters: list[tuple[int, str]] = [
            (number, name) for number, tenant in enumerate(plan.tenants) for name in tenant.adapters.names
        ]
        for row in plan.trace:
            if row.adapter is not None:
                everybody = range(len(plan.tenants))
                owners = everybody if row.tenant is None else [self._numbers[row.tenant]]
                self.adapters += [(number, row.adapter) for number in owners]
        self.adapters = [key for key in dict.fromkeys(self.adapters) if key[1] != BASE]
        self._adapter_numbers = {key: number for number, key in enumerate(self.adapters)}
        self._block_number = -1
        self._block: Sequence[LoadRequest] = ()

    def request(self, index: int) -> LoadRequest:
        """Return request number `index`, from 0; of a trace, the one in that row."""
        number, offset = divmod(index, _BLOCK)
        if number != self._block_number:
            self._block_number, self._block = number, self._draw(number)
        return self._block[offset]

    def prompt_ids(self, request: LoadRequest, pool: Sequence[int]) -> list[int]:
        """Draw a prompt's ids from `pool`, differently for each request, so that no two prompts share a prefix."""
        rng = np.random.default_rng([self._seed, 3, request.index])
        picked: list[int] = np.asarray(pool)[rng.integers(0, len(pool), request.prompt_tokens)].tolist()
        return picked

    def texts(self, request: LoadRequest, pool: Sequence[int], count: int) -> list[str | list[int]]:
        """Draw the texts of a call: from the tenant's prompts, or random ids if it has none."""
        rng = np.random.default_rng([self._seed, 4, request.index])
        if prompts := self.tenants[request.tenant].prompts:
            return [prompts[at] for at in rng.integers(0, len(prompts), count)]
        ids = np.asarray(pool)[rng.integers(0, len(pool), (count, request.prompt_tokens))]
        return list(ids.tolist())

    def _draw(self, block: int) -> list[LoadRequest]:
        rng = np.random.default_rng([self._seed, 2, block])
        tenants = rng.choice(len(self.tenants), size=_BLOCK, p=self._weights)
        if self._trace:
            return self._from_trace(block, tenants, rng)
        requests: list[LoadRequest] = []
        for number in range(len(self.tenants)):
            requests += self._draw_of(number, np.flatnonzero(tenants == number) + block * _BLOCK, rng)
        return sorted(requests, key=lambda request: request.index)

    def _from_trace(self, block: int, drawn_tenants: Whole, rng: np.random.Generator) -> list[LoadRequest]:
        requests = []
        for offset, row in enumerate(self._trace[block * _BLOCK : (block + 1) * _BLOCK]):
            number = int(drawn_tenants[offset]) if row.tenant is None else self._numbers[row.tenant]
            (drawn,) = self._draw_of(number, np.asarray([block * _BLOCK + offset]), rng)
            requests.append(self._as_traced(drawn, row))
        return requests

    def _draw_of(self, number: int, rows: npt.NDArray[np.int64], rng: np.random.Generator) -> list[LoadRequest]:
        """Draw the requests with these numbers, all of one tenant."""
        tenant, count = self.tenants[number], len(rows)
        adapters = tenant.adapters.draw(rng, count)
        prompts = rng.integers(0, max(1, len(tenant.prompts)), count)
        prompt_tokens = tenant.prompt_tokens.draw(rng, count)
        answer_tokens = tenant.answer_tokens.draw(rng, count)
        hurried, leaving = rng.random(count), rng.random(count)
        cancels = tenant.cancel.after_tokens.draw(rng, count) if tenant.cancel else np.zeros(count, np.int64)
        return [
            LoadRequest(
                index=int(rows[at]),
                tenant=number,
                adapter=self._adapter_numbers.get((number, tenant.adapters.names[adapters[at]])),
                prompt=tenant.prompts[prompts[at]] if tenant.prompts else None,
                prompt_tokens=int(prompt_tokens[at]),
                answer_tokens=int(answer_tokens[at]),
                deadline_s=tenant.deadline.after_s if tenant.deadline and hurried[at] < tenant.deadline.share else None,
                cancel_after=int(cancels[at]) if tenant.cancel and leaving[at] < tenant.cancel.share else None,
            )
            for at in range(count)
        ]

    def _as_traced(self, drawn: LoadRequest, row: TraceRow) -> LoadRequest:
        adapter = drawn.adapter
        if row.adapter is not None:
            adapter = self._adapter_numbers.get((drawn.tenant, row.adapter))
        prompt = drawn.prompt if row.prompt_tokens is None else None
        return LoadRequest(
            index=drawn.index,
            tenant=drawn.tenant,
            adapter=adapter,
            prompt=prompt if row.prompt is None else row.prompt,
            prompt_tokens=row.prompt_tokens or drawn.prompt_tokens,
            answer_tokens=row.answer_tokens or drawn.answer_tokens,
            deadline_s=drawn.deadline_s,
            cancel_after=drawn.cancel_after,
        )
