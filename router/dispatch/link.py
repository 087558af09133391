"""A worker's link as the dispatcher sees it: the frames that come over it, and what the router sends back."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from router.request import TokenLogprobs
from rpc.errors import CallError


class Link(Protocol):
    """The router's end of the relay stream from one worker incarnation."""

    worker_id: str
    incarnation: str
    # Time of the monotonic clock at which the last message came.
    heard_at: float

    def ack(self, job_id: str, attempt: int) -> None:
        """Let the worker forget the job."""

    def cancel(self, job_id: str, attempt: int, choice: int | None = None) -> None:
        """Make the worker stop the job, or one of its choices, and free what it holds."""

    def rewind(self, job_id: str, attempt: int, choice: int, offset: int) -> None:
        """Make the worker send a choice again from this offset."""


class WorkerFinish(StrEnum):
    """A worker's reason for the end of an answer."""

    LENGTH = "length"
    END = "end"
    STOP_TOKEN = "stop_token"
    # The answer's format is complete, and nothing may follow.
    COMPLETE = "complete"


class Frame(msgspec.Struct, frozen=True):  # one is made for each token: a dataclass takes seven times as long
    """Tokens of one choice as a worker sends them. `failure` ends the job; `returned` gives it back.

    `blamed` counts a strike: the worker's engine died, perhaps of this job.
    """

    job_id: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: WorkerFinish | None = None
    failure: CallError | None = None
    returned: bool = False
    blamed: bool = False
    adapter_ms: float | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # The vector of a job that asks for one, with its end.
    vector: tuple[float, ...] = ()
