"""Rollouts in a real cluster: requests while a revision goes canary, live, and worse ones are rolled back by each rule.

RELEASES=2000 (`make releases`) runs the long form, whose split is held against its share.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from loraplex.adapters.v1 import releases_pb2, releases_pb2_grpc

from loraplex.cli.gates import WINDOW, Examination, Result, read_gates
from loraplex.contracts.artifacts.names import sha256_file
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.router.generation.rollouts import place_of
from loraplex_client import AsyncClient, AsyncStoreClient, Client
from tests.adapter_store.sources.places import seaweed
from tests.hash_oracle import expected_ids, expected_tokens

StartCluster = Callable[..., AbstractAsyncContextManager[Any]]
MODEL = "hash:?vocab=600&seed=1&step_ms=8&context=200000"
TENANT = "acme"
NAME = "agent"
ADAPTER = f"tenants/acme/adapters/{NAME}"
REQUESTS = int(os.environ.get("RELEASES", "160"))
LONG = REQUESTS >= 1000
CLIENTS = 12 if LONG else 4
TOKENS = 6
# Every fifth request belongs to one of so many conversations.
SESSIONS = max(8, REQUESTS // 50)
PROMPTS = [f"prompt {number}" for number in range(16)]
# The end of the slow revision's chats: the beginning of each differs, so that no prefix is cached.
TAIL = "x" * 30_000
State = releases_pb2.ReleaseState


def write_adapter(directory: Path, weights: str, tail: str = "") -> Path:
    """Write an adapter of the hash model whose chats end with a text, which takes time where it is long."""
    directory.mkdir(parents=True)
    chat = {"template": "{{ messages[0].content }}" + tail}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "loraplex_chat": chat}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(f"weights of {weights}".encode())
    return directory


@dataclass
class Answered:
    """Answers by digest, mixed ones, and the digests that each conversation got, in order."""

    digests: Counter[str] = field(default_factory=Counter)
    mixed: int = 0
    sessions: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    # Times at which each digest answered.
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, digest: str, ids: Sequence[int], prompt_ids: Sequence[int], session: str) -> None:
        """Count an answer, and compare it with the model's own."""
        stopping = StoppingParams(max_tokens=TOKENS)
        self.mixed += tuple(ids) != expected_ids(MODEL, prompt_ids, adapter_digest=digest, stopping=stopping)
        self.digests[digest] += 1
        self.times[digest].append(time.time())
        if session:
            self.sessions[session].append(digest)


class Rollout:
    """Releases of one adapter, and requests for it at several routers."""

    def __init__(self, clients: Sequence[AsyncClient], store: AsyncStoreClient, stub: Any) -> None:
        self.clients, self.store, self.stub = clients, store, stub
        self.asked = 0
        self.answered = Answered()
        # The ends of chats, by digest.
        self.tails: dict[str, str] = {}

    async def ask(self, method: str, **fields: Any) -> Any:
        """Call ReleaseService."""
        request = getattr(releases_pb2, f"{method}Request")(**fields)
        return (await getattr(self.stub, method)(request, metadata=(("x-loraplex-tenant", TENANT),))).release

    async def release(self, directory: Path) -> Any:
        """Upload a revision, and return its qualified release."""
        pushed = await self.store.push(directory, NAME, alias="-")
        release = await self.ask("CreateRelease", revision=pushed.revision.name)
        gate = releases_pb2.GateResult(name="golden", passed=True)
        return await self.ask("QualifyRelease", name=release.name, gates=[gate])

    async def request(self, *, chat: bool = False) -> None:
        """Make the next request, at the next router, and take its answer."""
        number, self.asked = self.asked, self.asked + 1
        client = self.clients[number % len(self.clients)]
        session = f"session {number // 5 % SESSIONS}" if number % 5 == 0 else ""
        named: dict[str, Any] = {"session_id": session} if session else {"request_id": f"request-{number}"}
        prompt = PROMPTS[number % len(PROMPTS)]
        if chat:
            prompt = f"{number} {prompt}"
            messages = [{"role": "user", "content": prompt}]
            answer = await client.chat(messages, adapter_id=NAME, max_tokens=TOKENS, **named)
        else:
            answer = await client.generate(prompt, adapter_id=NAME, max_tokens=TOKENS, **named)
        digest = answer.adapter_revision.rpartition("/")[2]
        assert not answer.choices[0].logprobs, "those that shadow requests are compared by are not the client's"
        ids = list((prompt + (self.tails.get(digest, "") if chat else "")).encode())
        self.answered.take(digest, answer.token_ids, ids, session)

    async def until(self, name: str, state: State.ValueType, clients: int = CLIENTS, **kind: bool) -> Any:
        """Make requests of so many clients until a release is in a state; return it."""
        ended = asyncio.Event()

        async def client() -> None:
            while not ended.is_set():
                await self.request(**kind)

        async def watch() -> Any:
            request = releases_pb2.WatchReleasesRequest(parent=ADAPTER)
            call = self.stub.WatchReleases(request, metadata=(("x-loraplex-tenant", TENANT),))
            try:
                async for message in call:
                    if message.release.name == name and message.release.state == state:
                        return message.release
            finally:
                ended.set()
                call.cancel()
            return None

        async with asyncio.timeout(600 if LONG else 60), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            for _ in range(clients):
                tasks.create_task(client())
        return watching.result()


@asynccontextmanager
async def rollouts(start_cluster: StartCluster, directory: Path, url: str) -> AsyncIterator[tuple[Rollout, Any]]:
    """Run a cluster with a live revision, whose tenants may import from the object store."""
    first, sources = write_adapter(directory / "first", "first"), directory / "sources.toml"
    (directory / "key").write_text("key")
    rule = f'prefix = "s3://acme-adapters"\nendpoint = "{url}"\nregion = "us-east-1"\nallow_private = true\n'
    keys = '[credentials.s3]\naccess_key_id_file = "{0}"\nsecret_access_key_file = "{0}"\n'.format(directory / "key")
    sources.write_text(f'[[source]]\n{rule}credentials = "s3"\n{keys}')
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            start_cluster(MODEL, {NAME: first}, routers=2 if LONG else 1, store_flags=("--sources", str(sources)))
        )
        clients = [await stack.enter_async_context(AsyncClient(one, TENANT)) for one in cluster.local.routers]
        store = await stack.enter_async_context(AsyncStoreClient(cluster.local.store, TENANT))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.local.store))
        yield Rollout(clients, store, releases_pb2_grpc.ReleaseServiceStub(channel)), cluster


def put(url: str, content: bytes) -> None:
    """Make a bucket, or put an object into one."""
    with urllib.request.urlopen(urllib.request.Request(url, content, method="PUT"), timeout=60):
        pass


def plan(*steps: tuple[int, int], **fields: Any) -> releases_pb2.RolloutPlan:
    """Return a plan of steps (permille, requests)."""
    made = [releases_pb2.RolloutStep(permille=permille, requests=requests) for permille, requests in steps]
    return releases_pb2.RolloutPlan(steps=made, **fields)


def spoil(data: Path, weights: Path) -> None:
    """Damage the store's copy of an adapter's weights."""
    digest = sha256_file(weights / "adapter_model.safetensors").removeprefix("sha256:")
    (blob,) = (path for path in data.rglob(f"*{digest}*") if path.is_file() and "blobs" in path.parts)
    blob.chmod(0o600)
    blob.write_bytes(bytes(blob.stat().st_size))


def first_words(digest: str) -> list[str]:
    """Return the beginning of each prompt's answer by a revision."""
    words = []
    for prompt in PROMPTS:
        ids = expected_ids(MODEL, list(prompt.encode()), adapter_digest=digest, stopping=StoppingParams(max_tokens=2))
        words.append("".join(chr(one) if one < 256 else f"<{one}>" for one in ids))
    return [word for word in words if word.isprintable()]


async def check_rolled_back(rollout: Rollout, release: Any, live: str, rule: str, began: float) -> None:
    """Check that a rule has ended a release, with its figures, and that no request gets it any more."""
    last = release.history[-1]
    assert last.cause.startswith(rule), last.cause
    assert last.actor == "store"
    assert last.figures, "the figures that decided"
    took_s = last.time.ToNanoseconds() / 1e9 - began
    print(f"{rule}: rolled back {took_s:.1f} s after the canary began: {last.cause}")
    assert [event.after for event in release.history] == [
        State.RELEASE_STATE_IMPORTED,
        State.RELEASE_STATE_VERIFIED,
        State.RELEASE_STATE_QUALIFIED,
        State.RELEASE_STATE_CANARY,
        State.RELEASE_STATE_ROLLED_BACK,
    ]
    await asyncio.sleep(1.2)  # routers keep a name for a second
    rollout.answered = Answered()
    await asyncio.gather(*(rollout.request() for _ in range(20)))
    assert set(rollout.answered.digests) == {live}


@pytest.mark.timeout(3600 if LONG else 240)
async def test_a_revision_goes_live_and_worse_ones_are_rolled_back(start_cluster: StartCluster, tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    with seaweed(tmp_path / "objects") as url:
        put(f"{url}/acme-adapters", b"")
        await roll_out(start_cluster, tmp_path, url)


async def roll_out(start_cluster: StartCluster, tmp_path: Path, url: str) -> None:
    """Go through everything that may happen to releases of one adapter."""
    async with rollouts(start_cluster, tmp_path / "adapters", url) as (rollout, cluster):
        await quickstart(rollout, cluster, tmp_path, url)
        first = cluster.digests[NAME]
        good = await rollout.release(write_adapter(tmp_path / "good", "good"))
        steps = ((50, REQUESTS // 40), (250, REQUESTS // 8)) if LONG else ((200, 8), (500, 12))
        rules = {"min_requests": 5, "max_error_rise": 0.01}
        await rollout.ask("PromoteRelease", name=good.name, plan=plan(*steps, rules=rules))
        good = await rollout.until(good.name, State.RELEASE_STATE_LIVE)
        await asyncio.sleep(1.2)
        await asyncio.gather(*(rollout.request() for _ in range(20)))
        answered = rollout.answered
        assert answered.mixed == 0
        assert set(answered.digests) == {first, good.digest}
        for session, digests in answered.sessions.items():
            turned = digests.index(good.digest) if good.digest in digests else len(digests)
            # Two requests of a conversation may be under way while a step begins.
            assert first not in digests[turned + CLIENTS :], f"{session} went back: {digests}"
        shares = []
        for event, (permille, _) in zip(good.history[4:], steps, strict=True):
            candidate, live = event.figures["candidate_requests"], event.figures["live_requests"]
            shares.append((permille / 10, 100 * candidate / (candidate + live)))
            if LONG:
                assert abs(shares[-1][0] - shares[-1][1]) <= 2, shares
        print(f"{rollout.asked} requests; shares asked and got: {shares}")
        assert [event.actor for event in good.history[-2:]] == ["store", "store"]

        await gates(cluster, tmp_path, good.digest)
        await training(rollout)
        await by_errors(rollout, cluster, tmp_path, good.digest)
        await by_agreement(rollout, tmp_path, good.digest)
        if LONG:
            await by_ttft(rollout, tmp_path, good.digest)
            await by_refusals(rollout, tmp_path, good.digest)
        assert rollout.answered.mixed == 0
        print(f"{rollout.asked} requests, none failed")


async def quickstart(rollout: Rollout, cluster: Any, directory: Path, url: str) -> None:
    """Run the guide's first lines, and then requests until the release is live; `url` is of the object store."""
    page = (Path(__file__).parents[2] / "docs/guides/releases.md").read_text()
    lines = page.partition("## Quickstart")[2].partition("\n    ")[2].partition("\n\n")[0]
    lines += "\nloraplex releases export support --key key.pem > statement.json\n"
    key = ec.generate_private_key(ec.SECP256R1())
    (directory / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for number in (1, 2):
        write_adapter(directory / f"support-{number}", f"support {number}")
    for file in (directory / "support-2").iterdir():
        put(f"{url}/acme-adapters/support-2/{file.name}", file.read_bytes())
    addresses = {"LORAPLEX_ADDRESS": cluster.local.router, "LORAPLEX_STORE_ADDRESS": cluster.local.store}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-ec", lines),
        cwd=directory,
        env={**os.environ, **addresses, "PATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await shell.communicate())[0].decode()
    assert shell.returncode == 0, output
    assert "releases/1 is verified" in output
    assert "passed golden 1" in output
    check_statement((directory / "statement.json").read_bytes(), key.public_key())
    digests = [(await rollout.store.get("support"))[1].digest]
    while len(set(digests)) == 1:
        answers = (rollout.clients[0].generate("Hi", adapter_id="support", max_tokens=1) for _ in range(8))
        assert all(answer.adapter_revision for answer in await asyncio.gather(*answers))
        digests.append((await rollout.store.get("support"))[1].digest)
    assert "releases/1 is canary, 10%: step 1 of 2: 10%" in output


def check_statement(bundle: bytes, key: ec.EllipticCurvePublicKey) -> None:
    """Check the signature of an exported release as DSSE has it, and what it says."""
    envelope = json.loads(bundle)["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    signed = b"DSSEv1 28 application/vnd.in-toto+json %d %s" % (len(payload), payload)
    key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed, ec.ECDSA(hashes.SHA256()))
    statement = json.loads(payload)
    assert statement["subject"][0]["name"] == "tenants/acme/adapters/support/releases/1"
    assert [event["cause"] for event in statement["predicate"]["history"]][2] == "gates passed: 1"


def run_gates(cluster: Any, directory: Path, digest: str) -> dict[str, Result]:
    """Run gates that pass, and others that fail for each reason; returns their results by name."""
    stopping = StoppingParams(max_tokens=4)
    ids = list(expected_ids(MODEL, list(b"Hi"), adapter_digest=digest, stopping=stopping))
    text = "".join(chr(one) if one < 256 else f"<{one}>" for one in ids)
    golden = {"prompt": "Hi", "max_tokens": 4}
    tables: list[tuple[str, dict[str, Any]]] = [
        ("golden", {**golden, "name": "ids", "token_ids": ids, "text": text, "regex": "."}),
        ("golden", {**golden, "name": "answer", "answer": f" {text}"}),
        ("golden", {**golden, "name": "other answer", "answer": "Ho"}),
        ("accuracy", {"name": "half", "file": "questions.jsonl", "min": 0.5, "max_drop": 0.0, "max_tokens": 4}),
        ("accuracy", {"name": "more", "file": "questions.jsonl", "min": 0.6, "max_tokens": 4}),
        ("golden", {**golden, "name": "other ids", "token_ids": [*ids[:3], ids[3] + 1]}),
        ("golden", {**golden, "name": "regex", "regex": "^Dear"}),
        ("golden", {**golden, "name": "schema", "json_schema": {"type": "object"}}),
        ("golden", {**golden, "name": "floor", "min_mean_logprob": -0.001}),
        ("perplexity", {"name": "perplexity", "file": "text.txt", "max": 10.0, "max_ratio": 1.0}),
        ("perplexity", {"name": "too high", "file": "text.txt", "max": 1.0}),
        ("certificate", {"name": "certificate", "quantization": "int8"}),
        ("judge", {"name": "judge", "command": [sys.executable, "-c", JUDGE]}),
        ("judge", {"name": "harsh", "command": ["sh", "-c", "echo '{\"score\": 1}'; echo too short >&2; exit 3"]}),
        (
            "judge",
            {"name": "endless", "command": ["sh", "-c", "sleep 600 & echo $! > endless; wait"], "timeout_s": 0.5},
        ),
    ]
    lines = [
        f"[[{kind}]]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in one.items()) for kind, one in tables
    ]
    (directory / "gates.toml").write_text("\n".join(lines))
    (directory / "text.txt").write_text("a text of some tokens " * 60)
    questions = [
        {"prompt": "Hi", "answer": f"{text}\n"},
        {"messages": [{"role": "user", "content": "a"}], "answer": "no"},
    ]
    (directory / "questions.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in questions))
    with Client(cluster.local.router, TENANT) as client:
        examination = Examination(client, f"{NAME}@{digest}", f"{NAME}@live", (), directory)
        return {result.name: result for result in examination.run(read_gates(directory / "gates.toml"))}


JUDGE = """
import json, sys
answers = json.load(sys.stdin)["answers"]
print(json.dumps({"answers": len(answers), "tokens": answers[0]["tokens"]}))
"""


def alive(pid: int) -> bool:
    """Tell whether there is a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


async def gates(cluster: Any, directory: Path, digest: str) -> None:
    """Each kind of gate passes and fails for its reason; one that never ends has failed, with its processes."""
    results = await asyncio.to_thread(run_gates, cluster, directory, digest)
    assert {name for name, result in results.items() if result.passed} == {
        "ids",
        "answer",
        "half",
        "perplexity",
        "judge",
    }
    details = {name: result.detail for name, result in results.items()}
    assert details["other ids"].startswith("token 3 differs")
    assert details["other answer"].startswith("the answer is ")
    assert details["more"].startswith(
        "1 of 2 answers are right (95% interval 0.09 to 0.91), less than 0.6; question 2: "
    )
    figures = {"questions": 2, "accuracy": 0.5, "low": pytest.approx(0.0945, abs=1e-4), "live_accuracy": 0.5}
    assert {name: results["half"].figures[name] for name in figures} == figures
    assert details["regex"].startswith("the answer does not match the regex")
    assert details["schema"].startswith("the answer does not match the schema")
    assert details["floor"].startswith("its mean log probability -")
    assert details["too high"].startswith("perplexity ")
    assert details["certificate"].startswith("no certificate for int8")
    assert (details["harsh"], results["harsh"].figures) == ("too short", {"score": 1})
    assert results["judge"].figures == {"answers": 7, "tokens": 4}
    # The hash model gives each token one of 16 log probabilities by its number, whatever the adapter is.
    assert results["perplexity"].figures["ratio"] == 1
    values = [-(one % 16 + 1) / 16 for one in ("a text of some tokens " * 60).encode()]
    windows = [values[at + 1 : at + WINDOW] for at in range(0, len(values), WINDOW)]
    mean = sum(map(sum, windows)) / sum(map(len, windows))
    assert results["perplexity"].figures["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-6)
    assert details["endless"] == "did not end within 0.5 s"
    sleeper = int((directory / "endless").read_text())
    async with asyncio.timeout(60):
        while alive(sleeper):  # noqa: ASYNC110  # killed, but perhaps not yet gone
            await asyncio.sleep(0.01)


async def training(rollout: Rollout) -> None:
    """A training run pushes from memory; rollouts of several of its revisions run at once, each with its own."""
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    pushes = (rollout.store.push_adapter(config, b"step %d" % step, "policy", ttl_s=600) for step in range(4))
    pushed = await asyncio.gather(*pushes)
    digests = [one.revision.digest for one in pushed]
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 5, "logprobs": 0}
    answers = await asyncio.gather(
        *(rollout.clients[0].generate("Hi", adapter_id=f"policy@{one}", **options) for one in digests * 3)
    )
    for digest, answer in zip(digests * 3, answers, strict=True):
        assert answer.adapter_revision.endswith(digest)
        expected = expected_tokens(
            MODEL,
            list(b"Hi"),
            adapter_digest=digest,
            sampling=SamplingParams(temperature=1.0, seed=5),
            stopping=StoppingParams(max_tokens=TOKENS),
        )
        assert [(one, logprobs.logprob) for one, logprobs in expected] == [
            (token, given.logprob) for token, given in zip(answer.token_ids, answer.choices[0].logprobs, strict=True)
        ]
    aliases = {adapter.name: adapter.aliases for adapter in await rollout.store.list()}
    assert aliases["tenants/acme/adapters/policy"] == {}


async def by_errors(rollout: Rollout, cluster: Any, directory: Path, live: str) -> None:
    """A candidate whose bytes were damaged: requests that it cannot answer are answered by the live revision."""
    files = write_adapter(directory / "damaged", "damaged")
    release = await rollout.release(files)
    spoil(cluster.local.data_dir, files)
    began, rollout.answered = time.time(), Answered()
    # Each is tried for a while before it is given up.
    rules = {"min_requests": 10 if LONG else 3, "max_error_rise": 0.2}
    await rollout.ask("PromoteRelease", name=release.name, plan=plan((500, 1000), rules=rules))
    release = await rollout.until(release.name, State.RELEASE_STATE_ROLLED_BACK)
    assert set(rollout.answered.digests) == {live}
    assert rollout.answered.mixed == 0
    await check_rolled_back(rollout, release, live, "max_error_rise", began)


async def by_ttft(rollout: Rollout, directory: Path, live: str) -> None:
    """A candidate whose chat template makes prompts that take many steps."""
    release = await rollout.release(write_adapter(directory / "slow", "slow", TAIL))
    rollout.tails[release.digest] = TAIL
    began, rollout.answered = time.time(), Answered()
    rules = {"min_requests": 10, "max_ttft_ratio": 1.5}
    await rollout.ask("PromoteRelease", name=release.name, plan=plan((500, 1000), rules=rules))
    # Few, so that those of the live revision do not wait for the others' steps.
    release = await rollout.until(release.name, State.RELEASE_STATE_ROLLED_BACK, clients=2, chat=True)
    assert rollout.answered.mixed == 0
    assert rollout.answered.digests[release.digest] >= 10
    await check_rolled_back(rollout, release, live, "max_ttft_ratio", began)


async def by_refusals(rollout: Rollout, directory: Path, live: str) -> None:
    """A candidate whose answers begin as the phrases do."""
    release = await rollout.release(write_adapter(directory / "shy", "shy"))
    phrases = first_words(release.digest)
    assert phrases
    began, rollout.answered = time.time(), Answered()
    rules = {"min_requests": 10, "max_refusal_rise": 0.2}
    fields = {"rules": rules, "refusal_phrases": phrases}
    await rollout.ask("PromoteRelease", name=release.name, plan=plan((500, 1000), **fields))
    release = await rollout.until(release.name, State.RELEASE_STATE_ROLLED_BACK)
    assert rollout.answered.mixed == 0
    await check_rolled_back(rollout, release, live, "max_refusal_rise", began)


async def by_agreement(rollout: Rollout, directory: Path, live: str) -> None:
    """A candidate that only shadow requests get, and whose tokens are others."""
    release = await rollout.release(write_adapter(directory / "other", "other"))
    began, rollout.answered = time.time(), Answered()
    rules = {"min_requests": 10, "min_agreement": 0.9}
    fields = {"rules": rules, "shadow_permille": 1000}
    await rollout.ask("PromoteRelease", name=release.name, plan=plan((0, 1000), **fields))
    release = await rollout.until(release.name, State.RELEASE_STATE_ROLLED_BACK)
    assert set(rollout.answered.digests) == {live}, "tokens of shadow requests reach nobody"
    assert release.history[-1].figures["shadow_failure_rate"] == 0
    assert release.rollout.shadow.candidate_seconds > 0
    await check_rolled_back(rollout, release, live, "min_agreement", began)


def test_places_are_even_and_stay() -> None:
    places = [place_of("tenants/acme/adapters/support/releases/7", f"session {number}") for number in range(10_000)]
    for permille in (50, 250, 500):
        assert abs(sum(place < permille for place in places) / 10_000 - permille / 1000) < 0.01
    assert places != [place_of("tenants/acme/adapters/support/releases/8", f"session {n}") for n in range(10_000)]
