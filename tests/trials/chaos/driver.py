"""The clients: they send the plan's requests, and what comes of each is written down."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex_client import EncodeOptions, LoraplexError, Piece, UnavailableError
from loraplex_client.errors import DataLossError, ResourceExhaustedError
from loraplex_client.generation import TokenLogprobs
from tests.hash_answers import Logprobs
from tests.hash_formats import FORMATS
from tests.trials.chaos.history import Answer, History, Observation, Pair, Refusal, Request, Revision, Score, Texts
from tests.trials.chaos.ledger import OVER_QUOTA, callers
from tests.trials.chaos.oracle import NO, YES
from tests.trials.chaos.plan import MODEL_NAME, TENANTS, Plan, make_request
from tests.trials.chaos.tapped_client import TappedClient

# A request that has no outcome after so long has lost its tokens.
PATIENCE_S = 60.0
RETRY_S = 0.2
# Errors after which a request without a first token is sent again: nobody serves now, the queue is full, the store
# lies.
_REFUSALS = (UnavailableError, ResourceExhaustedError, DataLossError)


class Driver:
    """Keeps `plan.in_flight` requests running, as long as `allow` says that there may be more."""

    def __init__(self, plan: Plan, addresses: Sequence[str], revisions: Sequence[Revision], history: History) -> None:
        self._plan = plan
        self._addresses = tuple(addresses)
        self._revisions = tuple(revisions)
        self._history = history
        self._began = time.monotonic()
        self._next = 0
        self._allowed = 0
        self._last = False
        # The next requests are for these.
        self.cold: deque[Revision] = deque()
        self.live: dict[int, Observation] = {}
        # Whose every message somebody waits for.
        self._watched: set[int] = set()
        self._changed = asyncio.Condition()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def streaming(self) -> list[int]:
        """The requests that have brought tokens and still run."""
        return [number for number, observation in self.live.items() if observation.deltas]

    async def allow(self, count: int) -> None:
        """Allow `count` requests in all, counted from the first."""
        self._allowed = max(self._allowed, count)
        await self._notify()

    async def allow_more(self, count: int) -> None:
        """Allow `count` requests more than were sent."""
        await self.allow(self._next + count)

    async def finish(self) -> None:
        """No request comes beyond those that are planned or allowed."""
        self._last = True
        await self.allow(self._plan.requests)

    async def until_streaming(self, count: int) -> None:
        """Wait until so many requests have brought tokens and still run; allow others for those that end before."""
        async with self._changed:
            while len(self.streaming) < count:
                coming = len(self.live) + self._allowed - self._next
                if coming < count:
                    self._allowed += count - coming
                    self._changed.notify_all()
                await self._changed.wait()

    async def until_moved(self, numbers: Sequence[int]) -> None:
        """Wait until each of these requests has brought something from now on, or has ended."""
        before = {number: len(self.live[number].deltas) for number in numbers if number in self.live}
        self._watched |= before.keys()
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: all(n not in self.live or len(self.live[n].deltas) > seen for n, seen in before.items())
                )
        finally:
            self._watched -= before.keys()

    def on(self, address: str) -> list[int]:
        """The streams whose newest call goes to this address."""
        return [number for number in self.streaming if self.live[number].calls[-1].address == address]

    async def run(self) -> None:
        """Send everything; returns when every request has its outcome."""
        clients = {tenant: self._client(tenant) for tenant in TENANTS}
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.in_flight):
                    group.create_task(self._serve(clients))
        finally:
            for client in clients.values():
                await client.close()

    async def _serve(self, clients: Mapping[str, TappedClient]) -> None:
        while (number := await self._take()) is not None:
            revisions = (self.cold.popleft(),) if self.cold else callers(self._plan, number, self._revisions)
            request = make_request(self._plan.seed, number, revisions)
            if client := clients.get(request.revision.tenant):
                await self._ask(client, request)
                continue
            async with self._client(request.revision.tenant) as client:
                await self._ask(client, request)

    def _client(self, tenant: str) -> TappedClient:
        return TappedClient(self._addresses, tenant, lambda: self.now)

    async def _take(self) -> int | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._last or self._next < self._allowed)
            if self._next >= self._allowed:
                return None
            self._next += 1
            return self._next - 1

    async def _ask(self, client: TappedClient, request: Request) -> None:
        observation = self.live[request.number] = Observation(request, [], [], {}, [], 0.0)
        until, turn = time.monotonic() + PATIENCE_S, 0
        while True:
            turn += 1
            refused = await self._attempt(client, observation, f"{request.number}.{turn}", until)
            if refused is None:
                break
            observation.refused.append(refused)
            observation.calls.clear()
            await asyncio.sleep(RETRY_S)
        observation.ended = self.now
        del self.live[request.number]
        self._history.append(observation)
        await self._notify()

    async def _attempt(
        self, client: TappedClient, observation: Observation, request_id: str, until: float
    ) -> Refusal | None:
        """Make one call to its outcome, kept in `observation`; return how it was refused, if it was."""
        client.observations[request_id] = observation
        if observation.request.continuations:
            attempt = self._score(client, observation, request_id)
        elif observation.request.documents:
            attempt = self._rerank(client, observation, request_id)
        elif observation.request.texts is not None:
            attempt = self._encode(client, observation, observation.request.texts, request_id)
        else:
            attempt = self._generate(client, observation, request_id)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await attempt
            observation.error = "" if observation.completed else "the stream ended before its end"
        except TimeoutError:
            observation.error = f"no outcome in {PATIENCE_S:g} s"
        except LoraplexError as error:
            if error.reason == OVER_QUOTA:
                observation.error = OVER_QUOTA
                return None
            if isinstance(error, _REFUSALS) and not observation.deltas:
                code = observation.calls[-1].error.partition(":")[0]
                return Refusal(self.now, code, error.reason, getattr(error, "retry_after_s", None))
            observation.error = f"{type(error).__name__} {error.reason}: {error}"
        finally:
            del client.observations[request_id]
        return None

    async def _generate(self, client: TappedClient, observation: Observation, request_id: str) -> None:
        request = observation.request
        async with client.generate_stream(request.prompt, request_id=request_id, **options_of(request)) as stream:
            async for piece in stream:
                _take_piece(observation, piece)
                if len(observation.deltas) == 1 or request.number in self._watched:
                    await self._notify()

    async def _score(self, client: TappedClient, observation: Observation, request_id: str) -> None:
        request = observation.request
        scores = await client.score(
            request.prompt, request.continuations, request_id=request_id, **prompt_options_of(request)
        )
        observation.scores = [Score(one.token_ids, one.logprobs, one.greedy) for one in scores.scores]
        observation.revision, observation.prompt_tokens = scores.adapter_revision, scores.usage.prompt_tokens
        observation.completion_tokens = scores.usage.completion_tokens
        observation.completed = True

    async def _encode(self, client: TappedClient, observation: Observation, texts: Texts, request_id: str) -> None:
        inputs = [(one.first, one.second) if isinstance(one, Pair) else one for one in texts.inputs]
        options: EncodeOptions = {
            "model": MODEL_NAME,
            "adapter_id": observation.request.revision.name or None,
            "request_id": request_id,
        }
        if texts.task == "embed":
            found = await client.embed(inputs, pooling=texts.pooling or None, normalize=False, **options)
            observation.vectors = list(found.vectors)
            observation.revision, observation.prompt_tokens = found.adapter_revision, found.usage.prompt_tokens
        else:
            labelled = await client.classify(inputs, **options)
            observation.vectors = [one.logits for one in labelled.classifications]
            observation.revision, observation.prompt_tokens = labelled.adapter_revision, labelled.usage.prompt_tokens
        observation.completed = True

    async def _rerank(self, client: TappedClient, observation: Observation, request_id: str) -> None:
        request = observation.request
        ranking = await client.rerank(
            request.prompt,
            request.documents,
            model=MODEL_NAME,
            adapter_id=request.revision.name or None,
            request_id=request_id,
            yes=YES,
            no=NO,
        )
        observation.vectors = [(one.logit,) for one in sorted(ranking.results, key=lambda one: one.index)]
        observation.revision, observation.prompt_tokens = ranking.adapter_revision, ranking.usage.prompt_tokens
        observation.completed = True

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def prompt_options_of(request: Request) -> dict[str, Any]:
    """Return the options that Score takes too."""
    return {
        "model": MODEL_NAME,
        "adapter_id": request.revision.name or None,
        "add_special_tokens": request.add_special_tokens,
        "parse_special_tokens": request.parse_special_tokens,
        "truncate_prompt_tokens": request.truncate_to,
    }


def options_of(request: Request) -> dict[str, Any]:
    """Return the options of generate."""
    named = ("n", "best_of", "ignore_eos", "keep_stop", "logprobs", "prompt_logprobs", "skip_special_tokens", "echo",
             "logprobs_mode", "speculation")  # fmt: skip
    options: dict[str, Any] = {
        **prompt_options_of(request),
        "stream_interval": request.stream_interval,
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens or None,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "logit_bias": dict(request.logit_bias),
        "logprob_token_ids": list(request.logprob_token_ids),
        "allowed_token_ids": list(request.allowed_token_ids),
        "bad_words": list(request.bad_words),
        **{name: getattr(request, name) for name in named},
        **request.sampling,
        **({request.format: FORMATS[request.format]} if request.format else {}),
    }
    if request.default_temperature:
        options["default_temperature"] = options.pop("temperature", None)
        options |= {"default_max_tokens": 1, "cap_max_tokens": True}  # without effect beside a max_tokens that fits
    return {name: value for name, value in options.items() if value is not None and value not in ([], {})}


def _take_piece(observation: Observation, piece: Piece) -> None:
    if piece.finished is not None:
        for choice, whole in enumerate(piece.finished.choices):
            answer = observation.answers.setdefault(choice, Answer())
            answer.reason, answer.stop = whole.finish_reason.value, whole.stop
        observation.continuations, observation.revision = piece.finished.continuations, piece.finished.adapter_revision
        observation.prompt_logprobs = list(map(_plain, piece.finished.prompt_logprobs))
        usage = piece.finished.usage
        observation.prompt_tokens, observation.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if (drafts := piece.finished.speculative_decoding) is not None:
            observation.drafted, observation.accepted = drafts.draft_tokens, drafts.accepted_tokens
        observation.completed = True
        return
    answer = observation.answers.setdefault(piece.choice, Answer())
    answer.token_ids += piece.token_ids
    answer.text += piece.text
    answer.logprobs += map(_plain, piece.logprobs)


def _plain(token: TokenLogprobs) -> Logprobs:
    return token.logprob, token.alternatives
