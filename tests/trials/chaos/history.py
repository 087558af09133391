"""The history of a chaos run: a JSON line for its beginning, each request, each fault, and what was left.

Times are seconds since the beginning, by one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from loraplex.contracts.options import Pooling, Task
from tests.hash_answers import Logprobs


class Revision(msgspec.Struct, frozen=True):
    """An adapter that is in the store; without a name it is the plain base model."""

    tenant: str
    name: str = ""
    digest: str = ""


class Pair(msgspec.Struct, frozen=True):
    """Two texts that are encoded as one."""

    first: str
    second: str


class Texts(msgspec.Struct, frozen=True):
    """The texts of an Embed or Classify call."""

    task: Task
    inputs: tuple[str | tuple[int, ...] | Pair, ...]
    pooling: Pooling = ""


class Request(msgspec.Struct, frozen=True):
    """A client's whole request: the answer is a function of it."""

    number: int
    revision: Revision
    prompt: str
    max_tokens: int
    n: int = 1
    # None: n, and nothing is ranked.
    best_of: int | None = None
    # Fields of worker.engine_api.Sampling, seed included.
    sampling: dict[str, float | int] = {}
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    # The temperature is given as the caller's default.
    default_temperature: bool = False
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    keep_stop: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logprobs_mode: str | None = None
    speculation: str | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    stream_interval: int = 1
    # A key of tests.hash_formats.FORMATS; empty: none.
    format: str = ""
    echo: bool = False
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    truncate_to: int | None = None
    # Of a call of Score, for which `prompt`, `revision` and the three fields above count alone.
    continuations: tuple[str | tuple[int, ...], ...] = ()
    # Of a call of Embed or Classify, for which `revision` counts beside.
    texts: Texts | None = None
    # Of a call of Rerank, for which `revision` counts beside, and `prompt` is the query.
    documents: tuple[str, ...] = ()


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The first line. `planned` faults by kind."""

    model: str
    seed: int
    requests: int
    planned: dict[str, int]
    overlap: bool = False
    # The tenants have plans, and the ledger's counts must follow.
    ledger: bool = False


class Call(msgspec.Struct, tag=True):
    """An RPC of a request: Generate, a Resume, or Score. `error` is the status that it ended with."""

    at: float
    method: str
    address: str
    # Tokens of each choice that the client said it had.
    received: dict[int, int] = {}
    error: str = ""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """A message with tokens as it came from the wire; `call` counts the request's RPCs from 0."""

    at: float
    call: int
    choice: int
    offset: int
    token_ids: tuple[int, ...]


class Answer(msgspec.Struct):
    """The application's view of one choice, in the order of arrival."""

    token_ids: list[int] = []
    text: str = ""
    reason: str = ""
    stop: str | int | None = None
    logprobs: list[Logprobs] = []


class Score(msgspec.Struct, frozen=True, array_like=True):
    """A continuation's score as the application sees it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]


class Refusal(msgspec.Struct, frozen=True):
    """A call that ended with an error before anything came; `reason` is the ErrorInfo's, empty without one."""

    at: float
    code: str
    reason: str
    # The server's RetryInfo, in seconds.
    retry_s: float | None = None


class Observation(msgspec.Struct, tag=True):
    """A client's view of one request, from its first call to its outcome: completed, or the error."""

    request: Request
    calls: list[Call]
    deltas: list[Delta]
    answers: dict[int, Answer]
    # Calls that were refused and made again.
    refused: list[Refusal]
    ended: float
    completed: bool = False
    error: str = ""
    continuations: int = 0
    revision: str = ""
    prompt_logprobs: list[Logprobs] = []
    completion_tokens: int = 0
    prompt_tokens: int = 0
    # Tokens of drafts that were checked, and those of them that came, as the summary counts them.
    drafted: int = 0
    accepted: int = 0
    scores: list[Score] = []
    vectors: list[tuple[float, ...]] = []


class CrowdCall(msgspec.Struct, frozen=True, tag=True):
    """A call of a crowd: made once over plain gRPC, never repeated or resumed, or through the SDK.

    `router` is the name of the router that it went to. `code` is the status, `ends` counts the Summary messages.
    """

    fault: int
    request: Request
    # Specs of the models any of which may have answered; none: the request must be refused.
    models: tuple[str, ...]
    router: str
    began: float
    ended: float
    code: str
    reason: str = ""
    retry_s: float | None = None
    token_ids: tuple[int, ...] = ()
    ends: int = 0
    # A stream that has begun may end with an error, where that has a reason.
    may_break: bool = False
    # True: the SDK made it, which hides the fault.
    must_end: bool = False
    # True: it came with a resume token, so the cluster had admitted it.
    admitted: bool = False


class Fault(msgspec.Struct, tag=True):
    """A fault. `proof` says what shows that it happened; empty: it did not."""

    number: int
    kind: str
    victim: str
    # From the moment it struck to the moment it was mended.
    began: float
    mended: float
    # Requests that had tokens, and whose worker, router or link it was.
    hit: list[int]
    proof: str = ""
    error: str = ""


class Left(msgspec.Struct, frozen=True, tag=True):
    """Resources that an idle cluster still held."""

    blocks: int
    pins: int
    redis_keys: list[str]


class Charged(msgspec.Struct, frozen=True, tag=True):
    """A usage event: what a part of a request was charged."""

    id: str
    tenant: str
    request_id: str
    input: int
    output: int
    # Name of its account; empty: the base model's.
    adapter: str = ""
    # In nano-units of the currency: what the event says, and what its tokens cost.
    cost: int = 0
    due: int = 0


class Account(msgspec.Struct, frozen=True, tag=True):
    """The tokens that a tenant's account in Redis has at the end, and their cost in nano-units of the currency."""

    tenant: str
    tokens: int
    cost: int = 0


class Quota(msgspec.Struct, frozen=True, tag=True):
    """A tenant's tokens a day by its plan, and those of them that were used before the run."""

    tenant: str
    tokens: int
    used: int = 0


class Idle(msgspec.Struct, frozen=True, tag=True):
    """The commands that Redis carried out in a second for an idle cluster, those of scripts included."""

    commands_s: float


Line = Begun | Observation | CrowdCall | Fault | Left | Charged | Account | Quota | Idle
_decoder = msgspec.json.Decoder(Line)


class History:
    """Appends lines to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab")

    def append(self, line: Line) -> None:
        """Write it, at once."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_history(path: Path) -> Iterator[Line]:
    """The lines of a file."""
    with path.open("rb") as file:
        yield from read_lines(file)


def read_lines(lines: Iterable[bytes]) -> Iterator[Line]:
    """The lines of a history. Raises msgspec.DecodeError."""
    for line in lines:
        yield _decoder.decode(line)
