"""The `loraplex` command as a process: what it prints, how it fails, how it is interrupted."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from loraplex.inference.v1 import inference_pb2

import loraplex_client
from loraplex.cli.__main__ import main
from loraplex.cli.computations import ask_worker
from loraplex.cli.terminal import CommandError
from loraplex.cluster.v1 import cluster_pb2
from loraplex.contracts.artifacts import ArtifactError
from loraplex.model_tools.commands import measure
from loraplex.runtime.rpc import errors
from tests.cancelling_adapter import write_cancelling_adapter

if TYPE_CHECKING:
    from tests.tiny_models import TinyModel

HANG = "hang"
CANCEL_S = 20.0
NOBODY = "127.0.0.1:1"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "loraplex.cli", *arguments]


def _environ() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    return {**inherited, "COLUMNS": "120", "TERM": "dumb"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command to its end in this process, nothing of it at a terminal."""
    monkeypatch.setattr(os, "environ", _environ())

    def bound(*arguments: str, **environ: str) -> Done:
        os.environ.update(environ)
        monkeypatch.setattr(sys, "argv", ["loraplex", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, captured.out, captured.err)

    return bound


def _run_process(*arguments: str) -> Done:
    done = subprocess.run(_command(*arguments), capture_output=True, text=True, env=_environ(), check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def assert_refused(done: Done, *parts: str, code: int = 2) -> None:
    """Assert one line on stderr that says all of `parts`, nothing on stdout."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def test_help_lists_the_commands_and_loads_nothing_heavy() -> None:
    done = _run_process("--help")
    assert done.returncode == 0
    for command in ("up", "generate", "workers", "adapters", "models", "Exit codes"):
        assert command in done.stdout
    code = "import sys, loraplex.cli.__main__; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"grpc", "torch", "transformers", "uvloop", "numpy", "rich.live"} & set(modules)


def test_the_version_is_the_package_s(run: Run) -> None:
    assert run("--version").stdout == f"loraplex {version('loraplex')}\n"
    assert loraplex_client.__version__ == version("loraplex-client")


def test_the_version_of_a_release_has_its_commit(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "commit").write_text("0123456789abcdef0123456789abcdef01234567\n")
    monkeypatch.setattr("loraplex.cli.__main__.files", lambda package: tmp_path)
    assert run("--version").stdout == f"loraplex {version('loraplex')} (0123456789ab)\n"


def test_a_failure_leaves_nothing_else_on_stderr() -> None:
    assert_refused(_run_process("generate", "hi", "--router", NOBODY), "no router answers")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "hi", "--router", NOBODY], ["no router answers at 127.0.0.1:1", "loraplex up", "--router"]),
        (["workers", "--router", NOBODY], ["no router answers"]),
        (["workers", "--router", "http://a:1"], ["'http://a:1' is a URL: write HOST:PORT"]),
        (["adapters", "list", "--store", NOBODY], ["no store answers at 127.0.0.1:1", "--store"]),
        (["adapters", "push", "/nowhere", "--name", "a", "--store", NOBODY], ["/nowhere does not exist"]),
        (["models", "push", "/nowhere", "--store", NOBODY], ["/nowhere is not a directory"]),
        (
            ["models", "push", "examples/model", "--quantize", "int5", "--store", NOBODY],
            ["error: --quantize: 'int5' is not one"],
        ),
        (["models", "push", "hash:?vocap=9", "--store", NOBODY], ["vocap"]),
        (["generate", "hi", "--tenant", "a\tb"], ["tenant"]),
        (["generate", "hi", "--top-k", "-1"], ["sampling.top_k"]),
        (["generate", "hi", "--adapter", "a=much"], ["--adapter", "a=much", "not a number"]),
        (["generate", "hi", "--json-style", "nice"], ["json_style", "'nice'", "spaced, compact, flexible, sch"]),
        (["generate", "hi", "--json-style", "compact", "--json-style", "flexible"], ["json_style", "contradicts"]),
        (["generate"], ["PROMPT", "loraplex generate --help"]),
        (["generate", "hi", "--temprature", "1"], ["--temprature"]),
        (["nothing"], ["nothing", "loraplex --help"]),
        (["loadtest", "--compare", "a.json"], ["--compare", "2 arguments", "loraplex loadtest --help"]),
        (["gateway", "--prot", "3"], ["--prot"]),
        (["gateway", "--host", "0.0.0.0"], ["--insecure-tenants"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line(run: Run, arguments: list[str], parts: list[str]) -> None:
    assert_refused(run(*arguments), *parts)


def test_up_refuses_bad_paths_before_it_starts_anything(run: Run, tmp_path: Path) -> None:
    assert_refused(run("up", "--model", "/nowhere"), "/nowhere is not a directory")
    assert_refused(run("up", "--model", "hash:", "--adapters", str(tmp_path / "no")), "--adapters", "no does not exist")


def test_generate_streams_text(run: Run, server: Any, answer: list[Any]) -> None:
    server.service.script = answer
    done = run(
        "generate", "hello", "--adapter", "pirate", "--max-tokens", "9", "--stop", "a", "--stop", "b",
        LORAPLEX_ADDRESS=server.address, LORAPLEX_TENANT="acme",
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, " Ahoy\n", "")
    spec = server.service.requests[0].spec
    assert (spec.prompt, spec.adapter, spec.stopping.max_tokens) == ("hello", "pirate", 9)
    assert list(spec.stopping.stop) == ["a", "b"]
    assert not spec.HasField("sampling")
    assert server.service.tenants == ["acme"]


def test_generate_with_several_adapters(run: Run, server: Any, answer: list[Any]) -> None:
    revision = "tenants/acme/adapters/{}/revisions/sha256:00"
    for name, weight in (("pirate", 0.5), ("polite", -1.0)):
        answer[-1].summary.adapters.add(adapter=revision.format(name), weight=weight)
    server.service.script = answer
    done = run(
        "generate", "x", "-a", "pirate=0.5", "--adapter", "polite=-1", "-a", "a@b", "--json", "--router", server.address
    )
    said = json.loads(done.stdout)
    assert [(one["revision"], one["weight"]) for one in said["adapters"]] == [
        (revision.format("pirate"), 0.5), (revision.format("polite"), -1.0),
    ]  # fmt: skip
    spec = server.service.requests[0].spec
    assert [(one.adapter, one.weight) for one in spec.adapters] == [("pirate", 0.5), ("polite", -1.0), ("a@b", 1.0)]
    assert not spec.adapter


def test_generate_json(run: Run, server: Any, answer: list[Any]) -> None:
    server.service.script = answer
    done = run("generate", "hello", "--json", "--router", f"127.0.0.1:1,{server.address}")
    assert done.returncode == 0
    said = json.loads(done.stdout)
    assert said["text"] == " Ahoy"
    assert said["token_ids"] == [7, 8, 9]
    assert said["finish_reason"] == "stop"
    assert said["usage"] == {"prompt_tokens": 4, "cached_tokens": 2, "completion_tokens": 3}


def test_generate_several_answers_with_the_texts_of_their_tokens(
    run: Run, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delta(choice: int, text: str, ids: list[int]) -> inference_pb2.Delta:
        beside = [inference_pb2.Alternative(token_id=98, logprob=-2.0)]
        logprobs = [inference_pb2.TokenLogprobs(logprob=-0.5, alternatives=beside) for _ in ids]
        return inference_pb2.Delta(choice=choice, text=text, token_ids=ids, logprobs=logprobs)

    event, end = inference_pb2.GenerateEvent, inference_pb2.FINISH_REASON_LENGTH
    server.service.script = [
        event(resume_token="t", delta=delta(0, "a", [97])),
        event(delta=delta(1, "é", [195])),
        *(event(finished=inference_pb2.Finished(choice=choice, reason=end)) for choice in (0, 1)),
        event(summary=inference_pb2.Summary(usage=inference_pb2.Usage(prompt_tokens=1, completion_tokens=2))),
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    flags = ("-n", "2", "--logprobs", "1", "--system", "be brief", "--router", server.address)
    done = run("generate", "-", *flags)
    assert done.stdout == (
        "[0] a\n[1] é\nanswer\ttoken\ttext\tlogprob\tlikeliest\n"
        "0\t97\t'a'\t-0.500\t'b' -2.000\n1\t195\t'\\\\xc3'\t-0.500\t'b' -2.000\n"
    )
    spec = server.service.requests[0].spec
    assert [(one.role, one.content) for one in spec.chat.messages] == [("system", "be brief"), ("user", "from stdin")]
    assert (spec.output.n, spec.output.logprobs) == (2, 1)
    printed = json.loads(run("generate", "x", *flags, "--json").stdout)
    assert [choice["text"] for choice in printed["choices"]] == ["a", "é"]
    assert printed["logprobs"][0][0]["alternatives"] == [{"token_id": 98, "text": "b", "logprob": -2.0}]


def test_score_and_tokens(run: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    to = ("--router", server.address, "--tenant", "acme")
    done = run("score", "Paris is", " big", " far", "-a", "x=0.5", "-a", "y", *to)
    assert done.stdout == "SUM\tTOKENS\tGREEDY\tTEXT\n-2.0000\t2\tno\t big\n-2.0000\t2\tno\t far\n"
    request = server.service.requests[-1]
    assert [(one.adapter, one.weight) for one in request.spec.adapters] == [("x", 0.5), ("y", 1.0)]
    monkeypatch.setattr(sys, "stdin", io.StringIO(" big\n far\n near\n"))
    answer = json.loads(run("score", "Paris is", "--json", *to).stdout)
    assert [one.text for one in server.service.requests[-1].continuations] == [" big", " far", " near"]
    assert answer["scores"][2] == {
        "text": " near",
        "token_ids": [5, 6],
        "logprobs": [-0.5, -1.5],
        "sum": -2.0,
        "greedy": [True, False],
    }
    assert (answer["best"], answer["usage"]["prompt_tokens"]) == (0, 4)
    assert run("tokens", "hi!", *to).stdout == "3\n"
    assert run("tokens", "--chat", "hi", "--ids", "-a", "x", *to).stdout == "104 105\n"
    request = server.service.requests[-1]
    assert (request.chat.messages[0].content, request.adapter) == ("hi", "x")
    monkeypatch.setattr(sys, "stdin", io.StringIO("ho\n"))
    assert json.loads(run("tokens", "--json", *to).stdout) == {"tokens": 3, "token_ids": [104, 111, 10]}


def test_rerank(run: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    to = ("--router", server.address, "--tenant", "acme")
    shown = run("rerank", "q", "one", "two", "--top", "2", "-a", "x", "--instruction", "i", *to).stdout
    assert shown == "SCORE\tINDEX\tDOCUMENT\n0.5000\t1\ttwo\n0.5000\t0\tone\n"
    request = server.service.requests[-1]
    assert (request.query, request.top_n, request.adapter, request.instruction) == ("q", 2, "x", "i")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    said = json.loads(run("rerank", "q", "--json", "--yes", "A", "--no", "B", *to).stdout)
    assert said["results"][0] == {"text": "two", "index": 1, "score": 0.5, "logit": 0.0}
    assert (said["usage"]["cached_tokens"], server.service.requests[-1].no) == (2, "B")
    assert run("rerank", "q", "one", "--top", "0", *to).returncode == 2


def test_decide(run: Run, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = ("--router", server.address, "--tenant", "acme")
    asked = ("--question", "Which team?", "--choices", "billing", "--choices", "shipping")
    printed = json.loads(run("decide", "Twice!", *asked, "-a", "x=0.5", "-a", "y", "--calibrated", *to).stdout)
    request = server.service.requests[-1]
    assert (request.spec.prompt, request.calibrated, len(request.spec.adapters)) == ("Twice!", True, 2)
    assert [one.value for one in request.questions[0].choice.options] == ["billing", "shipping"]
    (decision,) = printed["decisions"]
    assert (decision["instructions"], decision["answer"]) == ("Which team?", "billing")
    assert decision["probabilities"] == {"billing": 0.75, "shipping": 0.25}
    assert decision["logprobs"] == {"billing": -0.981, "shipping": -2.079}
    assert "score" not in decision
    file = tmp_path / "questions.jsonl"
    file.write_text('{"instructions": "So?", "yes": "it is"}\n\n{"instructions": "How?", "levels": ["1", "2"]}\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO("Twice!\n"))
    printed = json.loads(run("decide", "--questions", str(file), "--chat", *to).stdout)
    request = server.service.requests[-1]
    assert request.spec.chat.messages[0].content == "Twice!\n"
    assert request.questions[0].predicate.yes == "it is"
    assert [one.get("score") for one in printed["decisions"]] == [None, 0.25]
    for flags, fault in (
        ((), "give the question with --question, or a file of them with --questions"),
        (("--question", "x", "--questions", str(file)), "give the question with --question, or a file"),
        (("--questions", str(file), "--choices", "a"), "--choices, --levels: are of --question"),
        (("--question", "x", "--choices", "a", "--levels", "b"), "questions[0]: give choices, levels, or what yes"),
    ):
        done = run("decide", "Twice!", *flags, *to)
        assert (done.returncode, done.stdout) == (2, "")
        assert fault in done.stderr


def test_decide_prints_a_table_at_a_terminal(server: Any) -> None:
    leader, follower = pty.openpty()
    command = _command("decide", "Twice!", "--question", "How?", "--levels", "calm", "--levels", "angry")
    command += ["--router", server.address]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=_environ()) as process:
        os.close(follower)
        _read_until(leader, b"calm 0.750, angry 0.250")
        _read_until(leader, b"")
    os.close(leader)
    assert process.returncode == 0


def test_embed_and_classify(run: Run, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    to = ("--router", server.address, "--tenant", "acme")
    assert run("embed", "a", "bcd", "--raw", "--pooling", "mean", "-a", "x", *to).stdout == "0.5 1\n0.5 3\n"
    request = server.service.requests[-1]
    assert (request.normalize, request.pooling, request.spec.adapter) == (False, inference_pb2.POOLING_MEAN, "x")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    said = json.loads(run("embed", "--truncate", "--json", *to).stdout)
    assert said["embeddings"][1] == {"text": "two", "vector": [0.5, 3.0]}
    assert said["usage"]["prompt_tokens"] == 2
    assert server.service.requests[-1].spec.truncate
    assert run("classify", "a", *to).stdout == "LABEL\tPROBABILITY\tTEXT\ngood\t0.7500\ta\n"
    said = json.loads(run("classify", "a", "b", "--json", "-a", "pirate", *to).stdout)
    assert said["labels"] == ["bad", "good"]
    one = {"label": "good", "probabilities": [0.25, 0.75], "logits": [0.0, 1.0]}
    assert said["classifications"] == [{"text": "a", **one}, {"text": "b", **one}]
    assert run("embed", "a", "--pooling", "max", *to).returncode == 2


@pytest.mark.parametrize(
    ("raised", "part", "code"),
    [
        (errors.NotFound("adapter", "nope"), "adapter not found: nope; `loraplex adapters list`", 2),
        (errors.NotBuilt("format.regex"), "format.regex", 2),
        (errors.Unavailable("no worker lives", retry_after_s=20.0), "no worker lives; try again in 20.0 s", 1),
        (errors.Internal("two\nlines\x1b[2J"), r"two\x0alines\x1b[2J", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, errors.CallError) else None,
)
def test_a_refusal_says_what_to_try(run: Run, server: Any, raised: errors.CallError, part: str, code: int) -> None:
    server.service.script = [raised]
    assert_refused(run("generate", "hello", "--router", server.address), part, code=code)


def test_text_and_error_stand_on_lines_of_their_own(run: Run, server: Any, answer: list[Any]) -> None:
    server.service.script = [answer[0], errors.Internal("broken")]
    done = run("generate", "hello", "--router", server.address)
    assert (done.returncode, done.stdout, done.stderr) == (1, " Ah\n", "error: broken\n")


def test_ctrl_c_cancels_quietly(server: Any, answer: list[Any]) -> None:
    server.service.script = [answer[0], HANG]
    command = _command("generate", "hello", "--router", server.address)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=_environ()) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == " Ah"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "\n", "")
    assert server.service.cancelled.wait(CANCEL_S)


def test_a_reader_that_leaves_cancels_quietly(server: Any, answer: list[Any]) -> None:
    client_gone = threading.Event()
    server.service.script = [answer[0], client_gone, answer[1], HANG]
    command = _command("generate", "hello", "--router", server.address)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=_environ()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == b" Ah"
        process.stdout.close()
        client_gone.set()
        assert process.stderr.read() == b""
    assert process.returncode == 1
    assert server.service.cancelled.wait(CANCEL_S)


def test_workers(run: Run, server: Any) -> None:
    server.service.workers = [
        cluster_pb2.Worker(
            worker_id="w-1",
            phase=cluster_pb2.WORKER_PHASE_SERVING,
            model="tiny",
            rows_running=2,
            rows_limit=32,
            blocks=cluster_pb2.Blocks(total=100, free=60, cached=30, referenced=10),
            adapter_slots=cluster_pb2.AdapterSlots(total=8, used=3, pinned=1),
            adapters=["sha256:00"],
        )
    ]
    header, row = run("workers", "--router", server.address).stdout.splitlines()
    assert len(header.split("\t")) == len(row.split("\t"))
    assert row.split("\t")[:7] == ["w-1", "serving", "tiny", "2/32", "0", "90/100", "10"]
    (worker,) = json.loads(run("workers", "--json", "--router", server.address).stdout)
    assert worker["blocks"] == {"total": 100, "free": 60, "cached": 30, "referenced": 10}
    assert worker["adapters"] == ["sha256:00"]


def test_adapters_top(run: Run, server: Any) -> None:
    tiers = cluster_pb2.AdapterTiers(
        fetching=1, loading=2, hits=30, misses=4, swaps=3, device_bytes=3 << 20, host_bytes=5 << 19,
        disk_bytes=7 << 20, disk_bytes_limit=100 << 20, disk_adapters=6, disk_hits=8, disk_misses=9,
    )  # fmt: skip
    slots = cluster_pb2.AdapterSlots(total=8, used=3, pinned=1)
    server.service.workers = [
        cluster_pb2.Worker(worker_id="w-1", adapter_slots=slots, adapter_tiers=tiers, adapters=["sha256:00"])
    ]
    for flags in ([], ["--once"]):
        header, row = run("adapters", "top", *flags, "--router", server.address, "--store", NOBODY).stdout.splitlines()
        assert dict(zip(header.split("\t"), row.split("\t"), strict=True)) == {
            "worker": "w-1",
            "resident": "3/8",
            "pinned": "1",
            "loading": "2",
            "fetching": "1",
            "hits": "30",
            "misses": "4",
            "swaps": "3",
            "device MiB": "3.0",
            "host MiB": "2.5",
            "disk MiB": "7.0/100.0",
            "on disk": "6",
            "disk hits": "8",
            "disk misses": "9",
            "adapters": "sha256:00",
        }
    (worker,) = json.loads(run("adapters", "top", "--json", "--router", server.address, "--store", NOBODY).stdout)
    assert worker["adapter_names"] == ["sha256:00"]
    assert worker["adapter_tiers"]["disk_bytes_limit"] == 100 << 20
    assert run("adapters", "top", "--once", "--router", NOBODY).returncode == 2


def test_adapters_top_names_every_revision(run: Run, server: Any, store_address: str, adapter_directory: Path) -> None:
    environ = {"LORAPLEX_STORE_ADDRESS": store_address, "LORAPLEX_ADDRESS": server.address}
    assert run("models", "push", "hash:?vocab=1024", **environ).returncode == 0

    def push(tenant: str, name: str, *flags: str) -> str:
        weights = f"{tenant} {name} {flags}".encode()
        (adapter_directory / "adapter_model.safetensors").write_bytes(weights)
        arguments = (str(adapter_directory), "--name", name, "--tenant", tenant, "--json", *flags)
        return str(json.loads(run("adapters", "push", *arguments, **environ).stdout)["digest"])

    older, sales = push("top-1", "sales", "--alias", "before"), push("top-1", "sales")
    assert run("adapters", "alias", "sales", "before", sales, "--tenant", "top-1", **environ).returncode == 0
    canary, gone = push("top-2", "mail", "--alias", "canary"), push("top-2", "gone")
    assert run("adapters", "delete", "gone", "--tenant", "top-2", **environ).returncode == 0
    unknown, weighted = "sha256:" + "f" * 64, "sha256:" + "e" * 64
    parts = [
        cluster_pb2.WeightedRevision(digest=sales, weight=0.5),
        cluster_pb2.WeightedRevision(digest=canary, weight=1),
    ]
    server.service.workers = [
        cluster_pb2.Worker(worker_id="w-1", adapters=[older, sales]),
        cluster_pb2.Worker(
            worker_id="w-2",
            adapters=[unknown, canary, gone, weighted],
            adapter_sets=[cluster_pb2.AdapterSet(digest=weighted, parts=parts)],
        ),
    ]
    done = run("adapters", "top", "--json", "--tenant", "nobody", **environ)
    assert done.stderr == ""
    assert [worker["adapter_names"] for worker in json.loads(done.stdout)] == [
        ["top-1/sales", f"top-1/sales@{older[:19]}"],
        [
            f"{unknown[:19]} (not in the store)",
            "top-1/sales=0.5 + top-2/mail@canary=1",
            f"top-2/gone@{gone[:19]} (deleted)",
            "top-2/mail@canary",
        ],
    ]
    done = run("adapters", "top", "--json", "--store", NOBODY, **environ)
    first, _ = json.loads(done.stdout)
    assert first["adapter_names"] == sorted([older[:19], sales[:19]])
    assert done.stderr.startswith(f"the store does not name the adapters: no store answers at {NOBODY}")


def test_adapters_top_follows_the_workers_until_it_is_interrupted(server: Any) -> None:
    slots = [cluster_pb2.AdapterSlots(total=8, used=used) for used in (3, 5)]
    server.service.workers = [cluster_pb2.Worker(worker_id="w-1", adapter_slots=slots[0])]
    leader, follower = pty.openpty()
    environ = {**_environ(), "TERM": "xterm", "COLUMNS": "200"}
    command = _command("adapters", "top", "--router", server.address)
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environ) as process:
        os.close(follower)
        _read_until(leader, b"3/8")
        server.service.workers = [cluster_pb2.Worker(worker_id="w-1", adapter_slots=slots[1])]
        _read_until(leader, b"5/8")
        process.send_signal(signal.SIGINT)
        _read_until(leader, b"")
    os.close(leader)
    assert process.returncode == 130


def _read_until(terminal: int, expected: bytes) -> None:
    """Read what a command writes to its terminal until that comes; empty: until it has left."""
    read = b""
    while not expected or expected not in read:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # nobody has the other end any more
            piece = b""
        if not piece:
            assert not expected, f"{expected!r} never came: {read!r}"
            return
        read += piece


def test_adapters_and_models(run: Run, server: Any, store_address: str, adapter_directory: Path) -> None:
    here = {"LORAPLEX_STORE_ADDRESS": store_address, "LORAPLEX_TENANT": "acme"}
    done = run("models", "push", "hash:?vocab=1024", **here)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["registered", "hash"]), done.stderr
    assert json.loads(run("models", "list", "--json", **here).stdout)[0]["context_length"] == 32768

    done = run("adapters", "push", str(adapter_directory), "--name", "support", **here)
    name = "tenants/acme/adapters/support"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"pushed {name}/revisions/sha256:")
    first = done.stdout.splitlines()[1]
    assert re.fullmatch("live is sha256:[0-9a-f]{12}", first)
    (adapter_directory / "chat_template.jinja").write_text("{{ messages }}")
    (adapter_directory / "added_tokens.json").write_text('{"<a>": 9, "<b>": 10, "<c>": 11, "<d>": 12}')
    done = run("adapters", "push", str(adapter_directory), "--name", "support", **here)
    said = [line for line in done.stdout.splitlines() if not line.startswith("pushed ")]
    assert said[0].startswith(f"live moved from {first.removeprefix('live is ')} to sha256:")
    assert said[1:] == [
        "chat_template.jinja was taken: chats with the adapter use its template",
        "added tokens were left out: the base has no tokenizer.json",
    ]
    assert not json.loads(
        run("adapters", "push", str(adapter_directory), "--name", "support", "--json", **here).stdout
    )["created"]
    assert [one["name"] for one in json.loads(run("adapters", "list", "--json", **here).stdout)] == [name]
    shown = json.loads(run("adapters", "show", "support", "--json", **here).stdout)
    assert shown["revisions"][0]["digest"] == shown["aliases"]["live"] == shown["revision"]
    assert shown["revision"] in run("adapters", "show", "support", **here).stdout
    assert run("adapters", "delete", "support", **here).stdout == "deleted support\n"
    assert_refused(run("adapters", "show", "support", **here), "adapter not found", "loraplex adapters list")


@pytest.fixture
def measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process: a worker process would import torch first, for seconds."""

    def ask_worker(command: str, flags: dict[str, str], progress: object = None) -> Any:
        try:
            return measure(command, [f"--{name}={value}" for name, value in flags.items()])
        except ArtifactError as error:
            raise CommandError(str(error)) from error

    monkeypatch.setattr("loraplex.cli.computations.ask_worker", ask_worker)


def test_a_rank_above_the_workers_is_told_at_the_push(
    run: Run, server: Any, store_address: str, adapter_directory: Path
) -> None:
    here = {"LORAPLEX_STORE_ADDRESS": store_address, "LORAPLEX_TENANT": "acme", "LORAPLEX_ADDRESS": server.address}
    run("models", "push", "hash:?vocab=1024", "--name", "tiny", **here)
    done = run("adapters", "push", str(adapter_directory), "--name", "ranked", "--model", "tiny", **here)
    assert done.stdout.splitlines()[-1] == "its rank 4 is above the 2 that workers of tiny take (--max-rank)"
    done = run(
        "adapters", "push", str(adapter_directory), "--name", "ranked", "--model", "tiny", "--router", NOBODY, **here
    )
    assert (done.returncode, "rank" in done.stdout.partition("live")[2]) == (0, False)


@pytest.mark.model
@pytest.mark.usefixtures("measured_here", "one_thread")
def test_certificates(run: Run, store_address: str, tiny_llama: TinyModel, tmp_path: Path) -> None:
    here = {"LORAPLEX_STORE_ADDRESS": store_address, "LORAPLEX_TENANT": "acme"}
    model = str(tiny_llama.directory)
    run("models", "push", model, "--name", "certified", **here)
    push = ("adapters", "push", "--model", "certified", "--model-dir", model)
    done = run(*push, str(tiny_llama.adapters["plain"]), "--name", "plain", "--certify", "int8", **here)
    assert done.returncode == 0, done.stderr
    header, row = (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
    figures = ["right", "same", "95%", "agreement", "mean KL", "max KL"]
    assert header == ["revision", "base", *figures, "prompts", "tokens", "verdict"]
    assert [row[index] for index in (1, 2, 3, 8, 10)] == ["int8", "-", "-", "16 drawn", "fit"]
    assert float(row[4].split("-")[0]) < float(row[5]) <= float(row[4].split("-")[1])
    assert "warning: drawn prompts judge free text" in done.stderr
    shown = json.loads(run("adapters", "show", "plain", "--json", **here).stdout)
    assert shown["aliases"]["live"] == shown["revision"]
    (certificate,) = shown["revisions"][0]["certificates"]
    assert (certificate["quantization"], certificate["verdict"], certificate["drawn"]) == ("int8", "fit", True)
    assert "\t".join(row) in run("adapters", "show", "plain", **here).stdout

    broken = write_cancelling_adapter(tiny_llama.directory, tmp_path / "broken")
    done = run(*push, str(broken), "--name", "broken", "--certify", "int4", **here)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split("\t")[-1].startswith("warned")  # drawn prompts refuse nothing
    shown = json.loads(run("adapters", "show", "broken", "--json", **here).stdout)
    assert shown["aliases"]["live"] == shown["revision"]
    certificate = shown["revisions"][0]["certificates"][0]
    assert (certificate["verdict"], certificate["breach"].partition("0.")[0]) == ("warned", "greedy agreement ")

    from loraplex.model_tools.quantized_copy import write_copy

    copy, prompts = tmp_path / "copy", tmp_path / "prompts.jsonl"
    write_copy(model, str(copy), "int8")
    prompts.write_text('{"prompt": "a"}\n{"prompt": "a", "answer": ""}\n')
    certify = ("adapters", "certify", "plain", "--model-dir", model, "--base", str(copy))
    assert run(*certify, **here).stdout.splitlines()[-1].split("\t")[1:] == row[1:]
    done = run(*certify, "--prompts", str(prompts), **here)
    assert done.stderr.endswith(
        "error: loraplex_certificate_prompts[1].answer: is not a text of 1 to 4096 characters\n"
    )
    for flags, words in (
        (("--base", "int8"), "--model-dir"),
        (("--base", "int8", "--model-dir", model, "--prompts", str(tmp_path)), "--prompts: "),
        (("--base", model, "--model-dir", model), "is not a quantized copy of the model in --model-dir"),
        (("--base", "int5", "--model-dir", model), "'int5' is not one of int8"),
        (("--base", "int8", "--model-dir", str(broken)), "has no config.json"),
        (("--base", "int8", "--model-dir", "examples/model"), "examples/model has digest sha256:"),
    ):
        assert_refused(run("adapters", "certify", "plain", *flags, **here), words)


def test_a_worker_s_lines_of_progress_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "print('Loading 1 of 2', 'measured 16 of 24 prompts', sep='\\n', file=sys.stderr); print('{}')"
    command = [sys.executable, "-c", f"import sys; {printed}"]
    monkeypatch.setattr("loraplex.cli.computations.worker_command", lambda *_: command)
    lines: list[str] = []
    assert ask_worker("certify", {}, lines.append) == {}
    assert lines == ["measured 16 of 24 prompts"]


def test_a_worker_process_that_computes_says_what_is_wrong_in_one_line() -> None:
    with pytest.raises(CommandError, match="model: /nowhere is not a directory") as caught:
        ask_worker("certify", {"model": "/nowhere", "quantized": "int8", "adapter": "a"})
    assert caught.value.exit_code == 2


@pytest.mark.model
@pytest.mark.usefixtures("measured_here", "one_thread")
def test_a_report_is_printed_and_written(run: Run, tmp_path: Path) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("Return a list of the names in the module.\n")
    flags = ("examples/model", "--to", "int8+embeddings", "--report", str(text))
    done = run("quantize", *flags, "--json", str(figures))
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    written = json.loads(figures.read_text())
    assert lines[:3] == [["model", "examples/model"], ["quantized", "int8+embeddings"], ["text", str(text)]]
    assert [line[0] for line in lines[3:8]] == ["layers", "embed_tokens", "q_proj", "k_proj", "v_proj"]
    assert [line[:3] for line in lines if line[0] == "MiB of weights"] == [["MiB of weights", "10.4", "5.3"]]
    assert lines[-1][0] == "after"
    assert written["continuation"]["prompt"] == "Return a list of the names in the module.\n"
    assert lines[-3] == ["prompt", "Return a list of the names in the module.\\n"]
    missing = run("quantize", *flags[:-1], str(tmp_path / "none.txt"))
    assert "none.txt: cannot be read as UTF-8 text" in missing.stderr
    assert_refused(run("quantize", "examples/model", "--to", "int8"), "--report FILE")
