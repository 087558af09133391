"""The file of a release's gates: what it may have, and one line that names what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.cli.gates import Golden, Judge, read_gates
from loraplex.cli.terminal import CommandError


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "held-out.txt").write_text("text")
    (tmp_path / "questions.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}], "answer": "b"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    path = tmp_path / "gates.toml"
    path.write_text(text)
    return path


def test_the_guide_s_gates_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/releases.md").read_text()
    gates = read_gates(
        write(
            tmp_path, page.partition("## Gates")[2].partition("```toml\n")[2].partition("```")[0].replace("{...}", "{}")
        )
    )
    assert [gate.name for gate in gates] == ["greeting", "questions", "held-out", "int8", "tone"]
    assert isinstance(gates[0], Golden)
    assert isinstance(gates[4], Judge)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has no gates"),
        ("[[gold]]\n", "[[gold]] is not one of [[golden]], [[accuracy]], [[perplexity]], "),
        ("[[golden]\n", "Expected"),
        ("[[golden]]\nprompt = 'a'\ntext = 'b'\nmax = 3\n", "golden 1: max is not one of"),
        (
            "[[golden]]\nprompt = 'a'\n",
            "golden 1: give answer, token_ids, text, regex, json_schema or min_mean_logprob",
        ),
        ("[[golden]]\ntext = 'a'\n", "golden 1: give either prompt or messages"),
        ("[[golden]]\nprompt = 'a'\nregex = '('\n", "golden 1: regex: "),
        ("[[golden]]\nprompt = 'a'\njson_schema = {type = 'x'}\n", "golden 1: json_schema: "),
        ("[[golden]]\nprompt = 'a'\ntext = 'b'\ntimeout_s = 0\n", "golden 1: timeout_s 0 is not a time"),
        ("[[accuracy]]\nmin = 1\n", "accuracy 1: give file"),
        ("[[accuracy]]\nfile = 'questions.jsonl'\n", "accuracy 1: give min or max_drop"),
        ("[[accuracy]]\nmin = 95\nfile = 'questions.jsonl'\n", "accuracy 1: min 95 is not a share from 0 to 1"),
        ("[[accuracy]]\nmin = 1\nfile = 'none.jsonl'\n", "none.jsonl is not a file"),
        ("[[accuracy]]\nmin = 1\nfile = 'empty.jsonl'\n", "empty.jsonl has no questions"),
        ("[[accuracy]]\nmin = 1\nfile = 'held-out.txt'\n", "held-out.txt: line 1 is not a JSON object such as"),
        ("[[accuracy]]\nmin = 1\nfile = 'prompts.jsonl'\n", "prompts.jsonl: line 2 has no answer"),
        ("[[perplexity]]\nfile = 'held-out.txt'\n", "perplexity 1: give max or max_ratio"),
        ("[[perplexity]]\nmax = 3\n", "perplexity 1: give file"),
        ("[[perplexity]]\nmax = 3\nfile = 'none.txt'\n", "none.txt is not a file"),
        ("[[certificate]]\n", "certificate 1: give quantization"),
        ("[[judge]]\ncommand = ['true']\n", "a judge needs golden prompts"),
        ("[[judge]]\ncommand = 'true'\n[[golden]]\nprompt = 'a'\ntext = 'b'\n", "judge 1: command is a list of words"),
        ("[[certificate]]\nname = 'a'\nquantization = 'int8'\n" * 2, "two gates are called a"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(CommandError) as error:
        read_gates(write(tmp_path, text))
    assert fault in str(error.value)
