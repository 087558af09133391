"""A client's transcript of one request's messages, compared with the model's answers option by option."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from loraplex.contracts.options import TokenLogprobs
from loraplex.router.request import Delta, Event, Finished, PromptLogprobs, Received, Request, Summary
from tests.hash_answers import Expected, ExpectedChoice, Logprobs
from tests.simulation.engine import STEP_S
from tests.simulation.options import activated, prompt_ids_of


@dataclass
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)
    # Number of tokens of each message.
    sizes: list[int] = field(default_factory=list)
    end: Finished | None = None


class Transcript:
    """The messages of one request, over all of its calls."""

    def __init__(self, request: Request, expected: Expected) -> None:
        self._request = request
        self._expected = expected
        self._choices = [_Choice() for _ in expected.choices]
        self._prompt_logprobs: list[tuple[Logprobs, ...]] = []
        self._summary: Summary | None = None
        self._faults: list[str] = []

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def charged(self) -> int:
        """Return the tokens that the client has got, with those of the prompt: by the summary, where it came."""
        if self._summary is not None:
            return self._summary.prompt_tokens + self._summary.completion_tokens
        return len(prompt_ids_of(self._request)) + self.tokens if self.tokens else 0

    @property
    def ids(self) -> list[list[int]]:
        """Return the ids of each choice."""
        return [choice.token_ids for choice in self._choices]

    def received(self) -> dict[int, Received]:
        """Return what the client has of each choice that anything has come of."""
        return {
            number: Received(tuple(choice.token_ids), choice.end is not None, len(choice.text.encode()))
            for number, choice in enumerate(self._choices)
            if choice.token_ids or choice.text or choice.end is not None
        }

    def take(self, event: Event) -> None:
        """Take an event; note what can't come after those before it."""
        match event:
            case Delta():
                self._take_delta(event)
            case Finished(choice=number):
                if self._choices[number].end is not None:
                    self._faults.append(f"choice {number}: ended twice")
                self._choices[number].end = event
            case PromptLogprobs(tokens=tokens):
                if self.tokens:
                    self._faults.append("the prompt's log probabilities came after tokens")
                self._prompt_logprobs.append(tuple(map(_plain, tokens)))
            case Summary():
                self._summary = event

    def _take_delta(self, delta: Delta) -> None:
        choice = self._choices[delta.choice]
        if choice.end is not None:
            self._faults.append(f"choice {delta.choice}: tokens after its end")
        if delta.offset != len(choice.token_ids):
            self._faults.append(f"choice {delta.choice}: offset {delta.offset} after {len(choice.token_ids)} tokens")
        choice.token_ids.extend(delta.token_ids)
        choice.text += delta.text
        choice.logprobs.extend(map(_plain, delta.logprobs))
        if delta.token_ids:
            choice.sizes.append(len(delta.token_ids))

    def check(self, *, whole: bool, resumed: bool) -> list[str]:
        """Return what is wrong; `whole`: the request was completed, `resumed`: over several calls."""
        wrong = list(self._faults)
        for number, (choice, expected) in enumerate(zip(self._choices, self._expected.choices, strict=True)):
            found = _whole_choice(choice, expected) if whole else _begun_choice(choice, expected)
            if not resumed:
                found += self._large_enough(choice)
            wrong += [f"choice {number}: {line}" for line in found]
        wrong += self._wrong_prompt_logprobs(begun=whole or self.tokens > 0)
        if whole:
            wrong += self._wrong_summary()
        return wrong

    def _large_enough(self, choice: _Choice) -> list[str]:
        """Check that every message but the last has `stream_interval` tokens."""
        least = self._request.stream_interval
        small = [size for size, _ in pairwise(choice.sizes) if size < least]
        return [f"a message of {small[0]} tokens, at least {least} wanted"] if small else []

    def _wrong_prompt_logprobs(self, *, begun: bool) -> list[str]:
        wanted = self._request.prompt_logprobs is not None
        if len(self._prompt_logprobs) > wanted or (wanted and begun and not self._prompt_logprobs):
            return [f"the prompt's log probabilities came {len(self._prompt_logprobs)} times"]
        if self._prompt_logprobs and self._prompt_logprobs[0] != self._expected.prompt_logprobs:
            count, expected = len(self._prompt_logprobs[0]), len(self._expected.prompt_logprobs)
            return [f"{count} log probabilities of the prompt are not the model's {expected}"]
        return []

    def _wrong_summary(self) -> list[str]:
        summary, expected = self._summary, self._expected
        prompt = prompt_ids_of(self._request)
        assert summary is not None
        wrong = []
        if summary.prompt_tokens != len(prompt):
            wrong.append(f"{summary.prompt_tokens} prompt tokens counted of {len(prompt)}")
        if summary.activated != activated(self._request):
            wrong.append(f"activated is {summary.activated}")
        if summary.completion_tokens != expected.completion_tokens:
            wrong.append(f"{summary.completion_tokens} tokens counted, the model's are {expected.completion_tokens}")
        drafts = summary.drafts
        if not drafts.accepted <= drafts.tokens * self._request.speculate:
            wrong.append(f"{drafts} counted, with speculate {self._request.speculate}")
        if self.tokens and summary.ttft_s < max(
            STEP_S, summary.queue_s
        ):  # a token takes a step, after the wait for a worker
            wrong.append(f"{summary.ttft_s} s to the first token, with {summary.queue_s} s in the queue")
        return wrong


def _plain(token: TokenLogprobs) -> Logprobs:
    return token.logprob, tuple(token.alternatives)


def _whole_choice(choice: _Choice, expected: ExpectedChoice) -> list[str]:
    if choice.end is None:
        return ["has no end"]
    stop = choice.end.stop_string if choice.end.stop_string is not None else choice.end.stop_token_id
    pairs = {
        "ids": (tuple(choice.token_ids), expected.token_ids),
        "text": (choice.text, expected.text),
        "end": ((choice.end.reason.value, stop), (expected.reason, expected.stop)),
        "log probabilities": (tuple(choice.logprobs), expected.logprobs),
    }
    return [f"its {what} {got} is not the model's {wanted}" for what, (got, wanted) in pairs.items() if got != wanted]


def _begun_choice(choice: _Choice, expected: ExpectedChoice) -> list[str]:
    """Check the beginning of a choice whose client left, or was refused, before the end."""
    count = len(choice.token_ids)
    if tuple(choice.token_ids) != expected.token_ids[:count]:
        return [f"{choice.token_ids} is no beginning of the model's {list(expected.token_ids)}"]
    if tuple(choice.logprobs) != expected.logprobs[:count] or not expected.text.startswith(choice.text):
        return ["its text or its log probabilities are no beginning of the model's"]
    return []
