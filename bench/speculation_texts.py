"""The requests of bench.speculation: chats about the texts in bench/texts, whose turns follow each other's answers.

edit       a text is to be returned with one change           extract    a text's facts become JSON, by a schema
chat       a question that no text answers                    agent      three turns: what to run, then a whole file
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loraplex.contracts.grammars.build import json_grammar

_TEXTS = Path(__file__).parent / "texts"
WORKLOADS = ("edit", "extract", "extract, no schema", "chat", "agent")
# Maximum tokens of an answer: the longest text, and some more.
_TOKENS = {"edit": 200, "extract": 220, "extract, no schema": 220, "chat": 96, "agent": 96}
# Maximum characters of a fact, so that every object ends.
_FACT = 40


@dataclass
class Conversation:
    """A chat: the user's turns, and the ids of what was said so far."""

    name: str
    turns: Sequence[str]
    tokens: int
    schema: str | None = None
    ids: list[int] = field(default_factory=list)

    @property
    def grammar(self) -> str:
        """Return the grammar that answers keep to; empty: none."""
        return "" if self.schema is None else json_grammar(self.schema)

    def ask(self, tokenizer: Tokenizer, turn: int) -> tuple[int, ...]:
        """Add a turn of the user; return the prompt of its answer."""
        text = f"<|im_start|>user\n{self.turns[turn]}<|im_end|>\n<|im_start|>assistant\n"
        self.ids += tokenizer.encode(text, add_special_tokens=False).ids
        return tuple(self.ids)

    def answered(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        """Add an answer."""
        end = tokenizer.encode("<|im_end|>\n", add_special_tokens=False).ids
        self.ids += [*(token for token in ids if token != end[0]), *end]


def conversations(workload: str, first: int, count: int) -> list[Conversation]:
    """Return chats of a workload, from its text `first` on, round and round."""
    file = _TEXTS / f"{workload.partition(',')[0]}.jsonl"
    items = [json.loads(line) for line in file.read_text().splitlines()]
    chosen = [items[(first + number) % len(items)] for number in range(count)]
    return [
        Conversation(f"{workload} {number}", _turns(workload, item), _TOKENS[workload], _schema(workload, item))
        for number, item in enumerate(chosen)
    ]


def _turns(workload: str, item: dict[str, Any]) -> list[str]:
    text = item.get("text", "")
    if workload == "edit":
        return [f"{item['change']} Answer with the whole text after this change and nothing else.\n\n{text}"]
    if workload.startswith("extract"):
        asked = f"Answer with a JSON list of three objects. The first one is {json.dumps(item['first'])}."
        return [f"{text}\n\n{asked}"]
    if workload == "chat":
        return [text]
    files, printed, code = item["observations"]
    return [
        f"You repair a program in steps. The files are: {files}. Answer with the one command that you run first.",
        f"It printed:\n{printed}\n\nAnswer with the command that shows the file with the mistake.",
        f"It printed:\n{code}\n\nAnswer with the whole file after you have corrected the mistake, and nothing else.",
    ]


def _schema(workload: str, item: dict[str, Any]) -> str | None:
    if workload != "extract":
        return None
    entry = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": _FACT} for name in item["first"]},
        "required": list(item["first"]),
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": entry, "minItems": 3, "maxItems": 3})
