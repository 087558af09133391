"""Changes the bodies of clients' requests and sends them to a gateway, for which none may be an internal error.

Some bodies get fields of their path's description, so that fields are tried that no recorded client sends.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.gateway.app import description
from tests.e2e.conftest import TENANT, Cluster, running_cluster
from tests.shapes.recorded import recorded
from tests.trials.fuzz.messages import changed_value
from tests.trials.fuzz.mutations import mutants

# Templates that show calls as objects, and as texts.
OBJECTS, TEXTS = "objects", "texts"
_START = (
    "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
)
_END = "</tool_call>{% endfor %}{% endfor %}[assistant]"
TEMPLATES = {
    OBJECTS: _START + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}' + _END,
    TEXTS: _START
    + "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments + '}' }}"
    + _END,
}
MODEL = "hash:?vocab=32000&seed=1"
# Bodies of the paths that no recorded client sends to.
_OTHERS: tuple[tuple[str, Any], ...] = (
    ("/v1/embeddings", {"model": OBJECTS, "input": ["a", "b"]}),
    ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 3, "details": True, "stop": ["a"], "seed": 1}}),
    ("/generate_stream", {"inputs": "x", "parameters": {"max_new_tokens": 3, "do_sample": True, "top_k": 3}}),
    ("/", {"inputs": "x", "stream": True, "parameters": {"max_new_tokens": 3}}),
    ("/tokenize", {"model": OBJECTS, "messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", {"inputs": "x"}),
    ("/detokenize", {"ids": [1, 2, 3]}),
    ("/v1/completions", {"model": TEXTS, "prompt": ["a", "b"], "max_tokens": 3, "n": 2, "best_of": 2, "logprobs": 2}),
    (
        "/v1/chat/completions",
        {"model": TEXTS, "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "logprobs": True}
        | {"top_logprobs": 2, "logit_bias": {"5": 1}, "response_format": {"type": "json_object"}, "n": 2},
    ),
    (f"/v1/adapters/{TEXTS}/releases/1", {"action": "promote", "etag": "a", "plan": {"steps": [{"seconds": 1}]}}),
)
# A path with parameters, by the beginning of those that are called.
_PARAMETERS = {"/v1/adapters/": "/v1/adapters/{adapter}/releases/{number}"}
# Number of bodies after which the next are made of the recorded ones again.
_ROUND = 500
# Maximum time in seconds of an answer: a few tokens of one request among a few.
_ANSWER_S = 20.0
# Parts of an answer, or of an event of a stream, that show an internal error.
_FAILURES = (b'"internal_error"', b'"code":"internal', b'"type":"api_error"', b'"error_type":"internal')


# Lines of a log that tell of an error that nobody handled, or of a part that failed.
_LOGGED = re.compile(r"^(?:\S+ \S+ (?:ERROR|CRITICAL) .*|Traceback .*|Fatal Python error.*)$", re.MULTILINE)


@asynccontextmanager
async def running(directory: Path, model: str = MODEL) -> AsyncIterator[Cluster]:
    """Run a cluster of a hash model with a gateway, and an adapter for each template."""
    adapters = {}
    for name, template in TEMPLATES.items():
        files = adapters[name] = directory / "adapters" / name
        files.mkdir(parents=True)
        chat = {"template": template, "tool_calls": "hermes"}
        (files / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 1, "loraplex_chat": chat}))
        (files / WEIGHTS_FILE).write_bytes(name.encode())
    # Changed bodies may have lost their number, and then ask for answers up to the context's end.
    flags = ("--default-max-tokens", "8")
    async with running_cluster(directory / "cluster", model, adapters, http=True, router_flags=flags) as cluster:
        yield cluster


class Described:
    """The bodies of the gateway's paths as it describes them."""

    def __init__(self) -> None:
        described = description()
        self._schemas: dict[str, Mapping[str, Any]] = {
            f"#/components/schemas/{name}": schema for name, schema in described["components"]["schemas"].items()
        }
        self._bodies: dict[str, Mapping[str, Any]] = {
            path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, methods in described["paths"].items()
            if "requestBody" in methods.get("post", {})
        }

    def field(self, path: str, draw: random.Random) -> dict[str, Any]:
        """Return one of the fields that a path's body has, with a value of its kind."""
        name = next((whole for begin, whole in _PARAMETERS.items() if path.startswith(begin)), path)
        fields = self._resolved(self._bodies[name])["properties"]
        drawn = draw.choice(list(fields))
        return {drawn: self._value(fields[drawn], draw)}

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._schemas[schema["$ref"]] if "$ref" in schema else schema

    def _value(self, schema: Mapping[str, Any], draw: random.Random) -> Any:
        schema = self._resolved(schema)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                # A null is one of the changes that every field gets.
                return self._value(draw.choice([of for of in schema[several] if of != {"type": "null"}]), draw)
        if "const" in schema or "enum" in schema:
            return draw.choice(schema.get("enum", [schema.get("const")]))
        match schema.get("type"):
            case "object":
                required = schema.get("required", ())
                fields = schema.get("properties") or {"a": {}}
                chosen = {name: of for name, of in fields.items() if name in required or draw.random() < _OPTIONAL}
                return {name: self._value(of, draw) for name, of in chosen.items()}
            case "array":
                return [self._value(schema.get("items", {}), draw) for _ in range(draw.randrange(3))]
            case str(kind) if kind in _OF_KIND:
                return draw.choice(_OF_KIND[kind])
        return draw.choice(_ANY)


# Fraction of bodies that get a field, and of an object's fields that are not required but there.
_ADDED, _OPTIONAL = 0.25, 0.2
_OF_KIND: Mapping[str, Sequence[Any]] = {
    "boolean": (False, True),
    "integer": (0, 1, 2, 5, -1, 2**40),
    "number": (0.0, 0.5, 1.0, 2, -1.5, 1e30),
    "string": (
        "",
        "a",
        "objects",
        "texts@live",
        "(a|b){2}",
        'start: "a" | /b+/',
        '{"type": "integer"}',
        "\ud800",
        "\0",
    ),
}
_ANY: Sequence[Any] = (
    {},
    [],
    None,
    "a",
    1,
    {"type": "string"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"$ref": "a"},
)


def changed_body(data: bytes, draw: random.Random, path: str, described: Described) -> bytes:
    """Return a JSON text with a few values in it changed; bytes that are none count as an empty object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = {}
    if isinstance(value, dict) and draw.random() < _ADDED:
        value |= described.field(path, draw)
        if draw.random() < 0.5:
            return json.dumps(value).encode()
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = changed_value(value, draw)
    return json.dumps(value, ensure_ascii=draw.random() < 0.5, default=repr).encode(errors="replace")


def changed_requests(draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield paths with bodies without end."""
    seeds: dict[str, list[bytes]] = {}
    for request in recorded().values():
        model = draw.choice(list(TEMPLATES))
        seeds.setdefault(request.path, []).append(json.dumps(request.body_for(model), ensure_ascii=False).encode())
    for path, body in _OTHERS:
        seeds.setdefault(path, []).append(json.dumps(body).encode())
    paths = [path for path, bodies in seeds.items() for _ in bodies]
    described = Described()
    changes = {path: partial(changed_body, path=path, described=described) for path in seeds}
    while True:
        # Begin again: after many changes a body is refused as a whole.
        made = {path: mutants(bodies, (), draw, changes[path]) for path, bodies in seeds.items()}
        for path in draw.choices(paths, k=_ROUND):
            yield path, next(made[path])


@dataclass
class Answers:
    """Numbers of answers by status, and those that say that a server failed."""

    statuses: Counter[int] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


async def send(
    address: str, path: str, body: bytes, headers: Mapping[str, str] = {}, timeout_s: float = _ANSWER_S
) -> tuple[int, bytes]:
    """Return the status of an answer and its bytes, as they came; 0 without one."""
    host, _, port = address.rpartition(":")
    lines = {"host": "localhost", "x-loraplex-tenant": TENANT, **headers, "content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, "connection": "close"}.items())
    if "connection" in headers:
        head = head.replace("connection: close", f"connection: close, {headers['connection']}")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        async with asyncio.timeout(timeout_s):
            answer = await reader.read(-1)
    except (ConnectionError, TimeoutError):
        return 0, b""
    finally:
        writer.close()
    return (int(answer.split(b" ", 2)[1]), answer) if answer else (0, b"")


# A chat with a large max_tokens would go on to the context's end.
_ENDS = {"x-request-timeout-ms": "5000"}


async def fuzz_bodies(cluster: Cluster, requests: Iterator[tuple[str, bytes]], at_once: int = 8) -> Answers:
    """Send all requests; answers that show a fault of the servers are findings, and errors in their logs."""
    answers = Answers()

    async def work() -> None:
        for path, body in requests:
            status, answer = await send(cluster.local.http, path, body, _ENDS)
            answers.statuses[status] += 1
            if status in (0, 500, 502) or any(failure in answer for failure in _FAILURES):
                answers.findings.append(f"{path}: {status} {answer[-300:]!r}, sent {body[:2_000]!r}")

    await asyncio.gather(*(work() for _ in range(at_once)))
    for log in (cluster.local.data_dir / "logs").glob("*.log"):
        answers.findings += [f"{log.name}: {line}" for line in _LOGGED.findall(log.read_text(errors="replace"))]
    return answers
