"""`loraplex loadtest` as a process: bad input in one line, the live screen, a service that tells everything at once."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loraplex.inference.v1 import inference_pb2

from loraplex.cli.__main__ import main
from loraplex.cli.loadtest import Screen
from loraplex.runtime.rpc import errors

NOBODY = "127.0.0.1:1"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["loraplex", "loadtest", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to run: give a load-test file, --rate or --concurrency"),
        (["--rate", "0"], "--rate: 0 must be a number greater than 0"),
        (["--rate", "1", "--concurrency", "1"], "give one of them"),
        (["--rate", "1", "--router", NOBODY], f"no router answers at {NOBODY} (Connection refused)"),
        (["--rate", "1", "--slo", "fast"], "--slo: 'fast' is not an SLO such as ttft<500ms"),
        (["--rate", "1", "--fail-if", "ttft.p50"], "--fail-if: 'ttft.p50' is not a condition"),
        (["--rate", "1", "--answer-tokens", "0"], "'--answer-tokens': Input should be greater than or equal to 1"),
        (["--rate", "1", "--requests", "0"], "'--requests': Input should be greater than or equal to 1"),
        (["--rate", "1", "--tenant", "a\tb"], "tenant"),
        (["--rate", "1", "--processes", "999"], "'--processes': Input should be less than or equal to 64"),
        (["--concurrency", "100001"], "'--concurrency': Input should be less than or equal to 100000"),
        (["--sweep", "1,1e9"], "flags: sweep.concurrency[1]: expected `int` <= 100000"),
        (["{dir}/many.toml"], "many.toml: processes: expected `int` <= 64"),
        (["--sweep", "1,two"], "--sweep: '1,two' is not a list of numbers"),
        (["{dir}/gone.toml"], "gone.toml: no such file"),
        (["{dir}/keys.toml"], "keys.toml: object contains unknown field `requets`"),
        (["{dir}/order.toml"], "order.csv:3: at_s 1 comes after 2: a trace must be in the order of its times"),
        (["--compare", "{dir}/gone.json", "{dir}/gone.json"], "gone.json: no such file"),
        (["--compare", "{dir}/order.csv", "{dir}/order.csv"], "order.csv: not JSON"),
        (["--rate", "1", "--threshold", "5"], "--threshold: belongs to --compare"),
        (["--compare", "{dir}/a", "{dir}/a", "--threshold", "nan"], "--threshold"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    (tmp_path / "keys.toml").write_text('requets = 5\nduration_s = 1\narrivals = {kind = "closed", concurrency = 1}')
    many = 'processes = 65\nduration_s = 1\narrivals = {kind = "closed", concurrency = 1}'
    (tmp_path / "many.toml").write_text(many)
    (tmp_path / "order.toml").write_text('arrivals = {kind = "trace", file = "order.csv"}')
    (tmp_path / "order.csv").write_text("at_s\n2\n1\n")
    filled = [argument.format(dir=tmp_path) for argument in arguments]
    code, out, err = run(monkeypatch, capsys, *filled, "--out", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert not (tmp_path / "out").exists()


def test_a_sweeps_report_as_json_and_then_compared(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    server: Any,
    answer: list[inference_pb2.GenerateEvent],
) -> None:
    server.service.script = answer
    out = tmp_path / "out"
    flags = ("--sweep", "1,2", "--requests", "7", "--answer-tokens", "9", "--adapter", "pirate", "--tenant", "acme")
    code, printed, err = run(monkeypatch, capsys, *flags, "--router", server.address, "--out", str(out), "--json")
    assert code == 0, err
    report = json.loads(printed)
    assert report == json.loads((out / "report.json").read_text())
    assert [run["sweep_value"] for run in report["runs"]] == [1, 2]
    assert all(max(run["timeline"]["running"]) <= run["sweep_value"] for run in report["runs"])
    assert len((out / "requests.csv").read_text().splitlines()) == 1 + 2 * 7
    result = report["runs"][1]
    assert result["statuses"] == {"OK": 7}
    # the script's answer: 3 tokens in 2 messages, and an adapter that it waited 250 ms for
    assert (result["figures"]["tokens"], result["times"]["itl"]["count"], result["figures"]["cold"]) == (21, 7, 7)
    assert result["times"]["adapter"]["p50"] == 0.25
    assert result["figures"]["continuations"] == 7
    specs = [request.spec for request in server.service.requests if hasattr(request, "spec")]
    assert {(spec.adapter, spec.stopping.max_tokens, spec.stopping.ignore_eos) for spec in specs} == {
        ("pirate", 9, True)
    }
    assert {len(spec.token_ids.ids) for spec in specs} == {64}
    assert set(server.service.tenants) == {"acme"}

    both = (str(out / "report.json"),) * 2
    code, printed, _ = run(monkeypatch, capsys, "--compare", *both)
    assert code == 0
    assert "closed loop, 2 at once\tttft.p99\t" in printed
    code, printed, _ = run(monkeypatch, capsys, "--compare", *both, "--json")
    assert {row["change"] for row in json.loads(printed)} <= {0.0, None}


def test_nothing_is_sent_where_the_report_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Any
) -> None:
    flags = ("--concurrency", "1", "--requests", "3", "--router", server.address, "--out", "/proc/nowhere")
    assert run(monkeypatch, capsys, *flags) == (2, "", "error: /proc/nowhere: No such file or directory\n")
    assert not any(hasattr(request, "spec") for request in server.service.requests)


def test_refusals_are_counted_by_status_and_reason_and_nothing_is_sent_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, server: Any
) -> None:
    server.service.script = [errors.Exhausted("queue", "the queue is full", retry_after_s=0.01, reason="QUEUE_FULL")]
    flags = ("--concurrency", "1", "--requests", "3", "--fail-if", "error_share>50%", "--fail-if", "ttft.p99>1s")
    code, _, err = run(monkeypatch, capsys, *flags, "--router", server.address, "--out", str(tmp_path / "out"))
    assert code == 1
    assert "error_share is 1, which fails error_share>50%" in err
    assert "ttft.p99 was never measured, which fails ttft.p99>1s" in err
    (result,) = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert result["statuses"] == {"RESOURCE_EXHAUSTED: QUEUE_FULL": 3}
    assert result["messages"] == {"RESOURCE_EXHAUSTED: QUEUE_FULL": "the queue is full"}
    assert "closed loop, 1 at once: RESOURCE_EXHAUSTED: QUEUE_FULL (3): the queue is full\n" in err
    assert "error: closed loop, 1 at once: none of 3 requests succeeded\n" in err
    assert sum(hasattr(request, "spec") for request in server.service.requests) == 3


def test_the_start_of_generator_processes_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loraplex.cli.loadtest._LINE_EVERY_S", 0.0)
    with Screen() as screen:
        screen.show("Poisson, 40/s", ())
    assert capsys.readouterr().err == "Poisson, 40/s: waiting for the generator processes\n"


def test_a_terminal_gets_a_live_screen(tmp_path: Path, server: Any, answer: list[inference_pb2.GenerateEvent]) -> None:
    server.service.script = answer
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "loraplex.cli", "loadtest", "--rate", "40", "--duration", "1"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    with subprocess.Popen(
        [*command, "--router", server.address, "--out", str(tmp_path / "out")],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # how a pty ends
            pass
    os.close(ours)
    assert process.returncode == 0, shown.decode()
    text = shown.decode()
    for part in ("running", "answered", "TTFT ms, p50 p99", "Poisson, 40/s", "report.html"):
        assert part in text
    assert "\x1b[" in text
