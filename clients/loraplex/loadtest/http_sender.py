"""Sends requests to an HTTP server as streams of OpenAI's completions.

A chunk with text counts as one token until the last one tells their number (`stream_options`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec

from loraplex.loadtest.decoding import PlanError
from loraplex.loadtest.plan import LoadPlan
from loraplex.loadtest.samples import LEFT, Outcome
from loraplex.loadtest.sender import Call, RequestFailure, Sender
from loraplex.loadtest.workload import WORDS, LoadRequest, Workload
from loraplex_client.endpoint import DEFAULT_TENANT, SYSTEM_CA, TENANT_KEY, credentials_of
from loraplex_client.errors import InvalidRequestError

# Timeout in seconds of each request before the test.
_ASK_S = 10.0
# Bodies of a request to /tokenize: vLLM's, and TGI's.
_TOKENIZE = ("prompt", "inputs")
# Statuses of a server that does not take a parameter.
_NOT_TAKEN = (400, 422)
# Statuses after which a later request may succeed.
_REFUSALS = (429, 503)
# Timeout in seconds of a connection.
_CONNECT_S = 5.0
_DONE = b"[DONE]"


@dataclass(frozen=True)
class HttpTarget:
    """A server and what it takes: ids as prompts, or `words` that texts are made of; and `ignore_eos`."""

    url: str
    model: str
    words: tuple[str, ...] = ()
    ignore_eos: bool = True

    def body(self, prompt: str | Sequence[int], max_tokens: int, model: str | None = None) -> dict[str, Any]:
        """Return the body of a request for a greedy completion."""
        body = {"model": model or self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return body | ({"ignore_eos": True} if self.ignore_eos else {})


def check_url(url: str) -> str:
    """Return the address of a server without `/v1` at its end. Raises PlanError."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise PlanError(f"--url: {url!r} is not an address such as http://127.0.0.1:8000")
    if parts.scheme == "http":
        try:
            credentials_of(None, None).check([f"{parts.hostname}:{parts.port or 80}"])
        except InvalidRequestError as error:
            raise PlanError(f"--url: {error.message}, with an address that begins with https") from error
    return url.rstrip("/").removesuffix("/v1")


def headers_of(tenant: str) -> dict[str, str]:
    """Return the headers of a tenant's requests: its name, and the credential of the environment."""
    named = {} if tenant == DEFAULT_TENANT else {TENANT_KEY: tenant}
    return {**named, "accept-encoding": "identity", **dict(credentials_of(None, None).metadata())}


def tls_of(url: str) -> ssl.SSLContext | bool:
    """Return how certificates are checked: by --ca, or by the system's authorities."""
    if url.startswith("http:"):
        return False  # there are none, and loading the system's authorities takes a second
    tls = credentials_of(None, None).tls
    if tls is None:
        return True
    context = ssl.create_default_context(cafile=None if tls.ca == SYSTEM_CA else tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def find_target(plan: LoadPlan, url: str) -> tuple[HttpTarget, tuple[int, ...]]:
    """Ask a server what it takes; returns it with the pool that prompts are drawn from.

    Raises PlanError where it does not answer, or refuses the plainest request.
    """
    if plan.task != "generate":
        raise PlanError(f"--url: a test of {plan.task} is sent to routers only")
    try:
        with httpx2.Client(
            base_url=url, headers=headers_of(plan.tenants[0].name), timeout=_ASK_S, verify=tls_of(url)
        ) as client:
            return _ask(client, plan, url)
    except httpx2.RemoteProtocolError as error:
        raise PlanError(f"{url} is not an HTTP server's address ({error}); --router takes a router's") from error
    except httpx2.HTTPError as error:
        raise PlanError(f"no server answers at {url} ({error or type(error).__name__})") from error


def _ask(client: httpx2.Client, plan: LoadPlan, url: str) -> tuple[HttpTarget, tuple[int, ...]]:
    model = plan.model or _first_model(client)
    ids, words = _ids(client, model), tuple(WORDS.split())
    pools = [((), ids)] if ids else []
    refusal = ""
    for its_words, pool in [*pools, (words, tuple(range(len(words))))]:
        for ignore_eos in (True, False):
            target = HttpTarget(url, model, its_words, ignore_eos)
            answer = client.post("/v1/completions", json=target.body(its_words[0] if its_words else list(ids[:4]), 1))
            if answer.status_code == 200:
                return target, pool
            refusal = f"{url} answers {answer.status_code}: {error_text(answer.content)[1]}"
            if answer.status_code not in _NOT_TAKEN:
                raise PlanError(refusal)
    raise PlanError(refusal)


def _first_model(client: httpx2.Client) -> str:
    answer = client.get("/v1/models")
    try:
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PlanError(f"{client.base_url} lists no model at /v1/models; name one in the load-test file") from error


def _ids(client: httpx2.Client, model: str) -> tuple[int, ...]:
    """Return token ids of the model's vocabulary; none where the server does not tokenize."""
    for field in _TOKENIZE:
        answer = client.post("/tokenize", json={field: WORDS} | ({"model": model} if field == "prompt" else {}))
        if answer.status_code != 200:
            continue
        value = answer.json()
        tokens = value.get("tokens", []) if isinstance(value, dict) else [token.get("id") for token in value]
        if tokens and all(isinstance(token, int) for token in tokens):
            return tuple(dict.fromkeys(tokens))
    return ()


def error_text(body: bytes) -> tuple[str, str]:
    """Return the code and the message of an error's body."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return "", body[:200].decode(errors="replace")
    error = value.get("error", value) if isinstance(value, Mapping) else value
    if not isinstance(error, Mapping):
        return "", str(error)
    return str(error.get("code") or error.get("type") or ""), str(error.get("message") or error)


class _Choice(msgspec.Struct):
    text: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Chunk).decode


class _FailedError(Exception):
    """An answer that is an error."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class HttpSender(Sender):
    """Sends a workload's requests to one HTTP server."""

    def __init__(self, target: HttpTarget, workload: Workload, pool: Sequence[int], plan: LoadPlan) -> None:
        super().__init__(workload, pool, plan)
        self._target = target
        self._headers = [{"content-type": "application/json", **headers_of(tenant.name)} for tenant in workload.tenants]
        self._http = httpx2.AsyncClient(
            base_url=target.url,
            verify=tls_of(target.url),
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def connect(self) -> None:
        """See Sender."""
        with contextlib.suppress(httpx2.HTTPError):
            await self._http.get("/v1/models", headers=self._headers[0])

    async def close(self) -> None:
        """See Sender."""
        await self._http.aclose()

    def prepare(self, request: LoadRequest) -> Call:
        """See Sender."""
        prompt: str | list[int] | None = request.prompt
        if prompt is None:
            prompt = self._workload.prompt_ids(request, self._pool)
            if self._target.words:
                prompt = " ".join(self._target.words[number] for number in prompt)
        adapter = None if request.adapter is None else self._workload.adapters[request.adapter][1]
        body = self._target.body(prompt, request.answer_tokens, adapter)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return partial(self._complete, request, msgspec.json.encode(body))

    def failure_of(self, error: Exception) -> RequestFailure | None:
        """See Sender."""
        match error:
            case _FailedError():
                return error.failure
            case TimeoutError():
                return RequestFailure("TIMEOUT", "no whole answer within the request's time")
            case httpx2.ConnectError() | httpx2.ConnectTimeout():
                return RequestFailure("UNREACHABLE", str(error) or "no connection", refused=True, unreachable=True)
            case httpx2.HTTPError() | msgspec.MsgspecError():
                return RequestFailure("BROKEN_ANSWER", f"{type(error).__name__}: {error}")
        return None

    async def _complete(self, request: LoadRequest, body: bytes, outcome: Outcome) -> None:
        async with (
            asyncio.timeout(request.deadline_s or self._timeout_s),
            self._http.stream("POST", "/v1/completions", content=body, headers=self._headers[request.tenant]) as answer,
        ):
            if answer.status_code != 200:
                raise await _refusal(answer)
            async for event in _events(answer):
                if event == _DONE:
                    return
                self._read(_decode(event), outcome)
                if request.cancel_after is not None and outcome.tokens >= request.cancel_after:
                    outcome.status = LEFT
                    return
        raise _FailedError(RequestFailure("BROKEN_ANSWER", "the stream ended without [DONE]"))

    def _read(self, chunk: _Chunk, outcome: Outcome) -> None:
        if bytes(chunk.error) not in (b"", b"null"):
            code, message = error_text(bytes(chunk.error))
            raise _FailedError(RequestFailure(f"ERROR_IN_STREAM: {code}".rstrip(": "), message))
        if any(choice.text for choice in chunk.choices):
            self._note(outcome, 1)
        if chunk.usage is not None:
            outcome.tokens = chunk.usage.completion_tokens
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            outcome.cached_tokens = (details.cached_tokens or 0) if details else 0


async def _refusal(answer: httpx2.Response) -> _FailedError:
    code, message = error_text(await answer.aread())
    after = answer.headers.get("retry-after", "")
    return _FailedError(
        RequestFailure(
            f"HTTP {answer.status_code}: {code}".rstrip(": "),
            message,
            refused=answer.status_code in _REFUSALS,
            retry_after_s=float(after) if after.isdecimal() else None,
        )
    )


async def _events(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the data of each event. Every server of this protocol sends it in one line."""
    rest = b""
    async for data in answer.aiter_raw():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
