"""Test the decisions of `loraplex up` beside its processes: whose adapters, which of them in the demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.cli.demo import DEMO_PROMPT, DemoQuestion, adapter_scenes, choose, read_questions, run_demo
from loraplex.cli.generate import AnswerTimer, format_figure
from loraplex.cli.launch import LaunchPlan, _next_command
from loraplex.cli.local import ClusterSettings, LocalCluster
from loraplex.cli.terminal import CommandError, print_fields, print_json, print_rows, printable
from loraplex.cli.upload_tree import AdapterDirectory, AdapterTree, find_adapters
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.runtime.rpc import errors


def _adapter(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"")
    return directory


def test_tenants_own_and_shared_adapters(tmp_path: Path) -> None:
    support = _adapter(tmp_path / "acme" / "support")
    polite = _adapter(tmp_path / "polite")
    sales = _adapter(tmp_path / "acme" / "sales")
    (tmp_path / "README.md").write_text("files beside them are nobody's")
    (tmp_path / ".cache").mkdir()
    assert find_adapters(tmp_path) == AdapterTree(
        (
            AdapterDirectory("acme", "sales", sales),
            AdapterDirectory("acme", "support", support),
            AdapterDirectory("shared", "polite", polite),
        )
    )


def test_a_bad_adapter_is_named_beside_the_others(tmp_path: Path) -> None:
    support = _adapter(tmp_path / "acme" / "support")
    (_adapter(tmp_path / "acme" / "sales") / "adapter_model.safetensors").unlink()
    (tmp_path / "globex").mkdir()
    tree = find_adapters(tmp_path)
    assert tree.adapters == (AdapterDirectory("acme", "support", support),)
    assert [fault.partition(" is ")[2] for fault in tree.faults] == [
        "not an adapter: it has no adapter_model.safetensors",
        "not an adapter, and holds none: it has no adapter_config.json",
    ]


def test_an_adapter_without_weights(tmp_path: Path) -> None:
    (_adapter(tmp_path / "acme" / "support") / "adapter_model.safetensors").unlink()
    with pytest.raises(CommandError, match=r"acme/support is not an adapter: it has no adapter_model\.safetensors"):
        find_adapters(tmp_path)


@pytest.mark.parametrize("linked", ["acme", "acme/support", "acme/support/adapter_config.json"])
def test_links_are_not_followed(tmp_path: Path, linked: str) -> None:
    """They may lead to files that whoever wrote them may not read."""
    _adapter(tmp_path / "elsewhere" / "acme" / "support")
    root = tmp_path / "adapters"
    root.mkdir()
    if linked != "acme":
        (root / "acme").mkdir()
    if linked.endswith(".json"):
        _adapter(root / "acme" / "support")
        (root / linked).unlink()
    (root / linked).symlink_to(tmp_path / "elsewhere" / linked)
    with pytest.raises(CommandError, match=rf"{linked} is a symbolic link, and links are not followed"):
        find_adapters(root)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing", "missing does not exist"),
        ("file", "file is not a directory"),
        ("empty", "empty holds no adapters"),
        ("tree/acme/support", "is an adapter itself; give its parent directory"),
        ("half", "half/globex is not an adapter, and holds none"),
        ("stray", "stray/acme/notes is not an adapter: it has no adapter_config.json"),
        ("names", "Support Desk: adapter: .* letters"),
    ],
)
def test_what_is_no_folder_of_adapters(tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    _adapter(tmp_path / "tree" / "acme" / "support")
    (tmp_path / "half" / "globex").mkdir(parents=True)
    (tmp_path / "stray" / "acme" / "notes").mkdir(parents=True)
    _adapter(tmp_path / "names" / "acme" / "Support Desk")
    with pytest.raises(CommandError, match=message) as caught:
        find_adapters(tmp_path / given)
    assert caught.value.exit_code == 2


async def test_the_demo_streams_every_answer(
    server: Any, answer: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server.service.script = answer
    await run_demo(
        server.address,
        adapter_scenes([AdapterDirectory("acme", "shout", Path()), AdapterDirectory("b", "json", Path())]),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{DEMO_PROMPT} ..."
    assert sorted(lines[1:4]) == ["[acme/shout]  Ahoy", "[b/json]  Ahoy", "[base model]  Ahoy"]
    assert lines[4].split("\t") == ["adapter", "tenant", "TTFT ms", "tokens", "tokens/s"]
    assert [line.split("\t")[:2] for line in lines[5:]] == [
        ["shout", "acme"],
        ["json", "b"],
        ["(base model)", "default"],
    ]
    assert all(line.split("\t")[3] == "3" for line in lines[5:])
    adapters = [request.spec.adapter for request in server.service.requests]
    asked = zip(server.service.tenants, adapters, strict=True)
    assert sorted(asked) == [("acme", "shout"), ("b", "json"), ("default", "")]


async def test_the_demo_asks_the_base_model_what_it_asks_an_adapter(
    server: Any, answer: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server.service.script = answer
    adapters = [AdapterDirectory("acme", "triage", Path()), AdapterDirectory("b", "json", Path())]
    questions = [DemoQuestion("acme", "triage", "Which team?\n\nHelp!"), DemoQuestion("acme", "unknown", "What?")]
    await run_demo(server.address, adapter_scenes(adapters, questions))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == ["Which team?", "", "Help!", "[acme/triage]  Ahoy", "[base model]  Ahoy", ""]
    sent = [request.spec.chat.messages for request in server.service.requests]
    assert [[(message.role, message.content) for message in chat] for chat in sent] == [
        [("user", "Which team?\n\nHelp!")],
        [("user", "Which team?\n\nHelp!")],
    ]


def test_questions_are_read_from_beside_the_adapters(tmp_path: Path) -> None:
    assert read_questions(None) == read_questions(tmp_path) == ()
    file = tmp_path / "questions.jsonl"
    file.write_text('{"tenant": "acme", "adapter": "triage", "text": "Which team?"}\n')
    assert read_questions(tmp_path) == (DemoQuestion("acme", "triage", "Which team?"),)
    file.write_text('{"tenant": "acme", "text": "Which team?"}\n')
    with pytest.raises(CommandError, match=r"questions\.jsonl: .*adapter.*; a line is an object of tenant, adapter"):
        read_questions(tmp_path)


async def test_one_failed_answer_fails_the_demo(server: Any, answer: list[Any]) -> None:
    server.service.script = [answer[0], errors.Internal("broken")]
    with pytest.raises(CommandError, match="base model: broken") as caught:
        await run_demo(server.address, adapter_scenes([]))
    assert caught.value.exit_code == 1


def test_the_demo_shows_three_tenants_before_a_second_adapter_of_one() -> None:
    def chosen(*names: str) -> list[str]:
        adapters = [AdapterDirectory(Path(name).parent.name, Path(name).name, Path(name)) for name in names]
        return [f"{adapter.tenant}/{adapter.name}" for adapter in choose(adapters)]

    assert chosen("a/1", "a/2", "b/1", "c/1", "d/1") == ["a/1", "b/1", "c/1"]
    assert chosen("a/1", "a/2", "b/1") == ["a/1", "b/1", "a/2"]
    assert chosen() == []


def test_an_answer_timer_counts_tokens() -> None:
    timer = AnswerTimer()
    assert (format_figure(timer.ttft_ms), format_figure(timer.tokens_per_s), timer.tokens) == ("-", "-", 0)
    timer.record(0)
    assert timer.ttft_ms is None
    timer.record(2)
    assert timer.ttft_ms is not None
    assert timer.tokens_per_s is None
    timer.record(3)
    assert timer.tokens == 5


def test_text_can_not_steer_the_terminal() -> None:
    assert printable("a\tb\nc\x1b[2J\x07\x9b1m\x7f é") == "a\tb\nc[2J1m é"


def test_a_value_is_one_cell_of_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(["name", "state"], [["a\tb\nevil\tserving", "\x1b[2Jdead"]])
    print_fields([("name", "a\nrole\tadmin")])
    assert capsys.readouterr().out == "name\tstate\na b evil serving\t[2Jdead\nname\ta role admin\n"


def test_json_can_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"text": "é\x1b[2J\x9b1m\x7f\u202e\ud800"}
    print_json(value)
    written = capsys.readouterr().out
    assert json.loads(written) == value
    assert written.rstrip("\n").isprintable()
    assert "é" in written


@pytest.mark.parametrize(
    ("credentials", "command"),
    [
        (None, 'generate "Return a list of" --tenant acme --adapter shout'),
        (Path("secured"), "--ca secured/ca.pem --api-key-file secured/first-operator.key tenants create acme"),
    ],
)
def test_the_next_command_is_one_that_works(credentials: Path | None, command: str) -> None:
    settings = ClusterSettings(model="hash:", credentials=credentials)
    tree = AdapterTree((AdapterDirectory("acme", "shout", Path()),))
    plan = LaunchPlan(settings, read_base_model("hash:", "tiny"), tree, update=False, demo=False, once=False)
    assert _next_command(plan, LocalCluster(settings)).startswith(command)


def test_the_next_command_asks_the_first_question() -> None:
    settings = ClusterSettings(model="hash:")
    tree = AdapterTree((AdapterDirectory("acme", "triage", Path()),))
    asked = (DemoQuestion("acme", "triage", "Which team?\n\nHelp!"),)
    base = read_base_model("hash:", "tiny")
    plan = LaunchPlan(settings, base, tree, update=False, demo=True, once=False, questions=asked)
    command = "generate 'Which team? Help!' --chat --tenant acme --adapter triage"
    assert _next_command(plan, LocalCluster(settings)) == command


@pytest.mark.parametrize(
    ("flags", "workers", "devices"),
    [
        (("--device=cuda",), 3, ["cuda:0", "cuda:1", "cuda:2"]),
        (("--device=cuda", "--tensor-parallel=2"), 2, ["cuda:0", "cuda:2"]),
        (("--device=cuda",), 1, ["cuda"]),
        (("--device=cuda:1",), 2, ["cuda:1", "cuda:1"]),
    ],
)
def test_workers_on_cuda_have_devices_of_their_own(flags: tuple[str, ...], workers: int, devices: list[str]) -> None:
    settings = ClusterSettings("hash:", workers=workers, worker_flags=flags)
    chosen = [settings.flags_of_worker(index) for index in range(workers)]
    assert [[flag for flag in own if flag.startswith("--device=")][-1] for own in chosen] == [
        f"--device={device}" for device in devices
    ]
    assert not any("--threads" in own for own in chosen)
