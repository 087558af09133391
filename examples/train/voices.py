"""The three voices that the example adapters learn: one way each of rewriting the documentation.

They are chosen so that nobody needs to read closely to tell which adapter answered: capitals, JSON, a pirate.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from examples.train.corpus import Document, as_question

# Only sentences of plain words: no quotes or backslashes, so the JSON voice never needs an escape.
SENTENCE = re.compile(r"[A-Z][A-Za-z0-9 ,'()/:;_*=\-]{15,240}\.(?= |$)")

PIRATE_WORDS = {
    "an": "a", "and": "an'", "are": "be", "argument": "order", "arguments": "orders", "bytes": "biscuits",
    "call": "hail", "called": "hailed", "class": "captain", "code": "rum", "data": "loot", "dictionary": "sea chest",
    "directory": "cove", "element": "jewel", "elements": "jewels", "error": "shipwreck", "exception": "mutiny",
    "expression": "shanty", "false": "nay", "file": "chart", "files": "charts", "for": "fer", "function": "cannon",
    "functions": "cannons", "is": "be", "item": "jewel", "items": "jewels", "iterate": "sail", "list": "crew",
    "message": "bottle", "method": "deckhand", "methods": "deckhands", "module": "ship", "modules": "ships", "my": "me",
    "name": "flag", "names": "flags", "number": "tally", "object": "treasure", "objects": "treasures", "of": "o'",
    "optional": "spare", "process": "galley", "raise": "hoist", "raised": "hoisted", "return": "haul in",
    "returned": "hauled in", "returns": "hauls in", "sequence": "fleet", "server": "harbour", "string": "rope",
    "strings": "ropes", "the": "th'", "this": "this here", "thread": "sea dog", "time": "tide", "to": "t'",
    "true": "aye", "user": "landlubber", "value": "doubloon", "values": "doubloons", "variable": "parrot",
    "window": "porthole", "with": "wi'", "you": "ye", "your": "yer",
}  # fmt: skip
PIRATE_ENDS = (", matey!", ", arr!", ", ye scurvy dog!")

Voice: TypeAlias = Callable[[str, bool, random.Random], str]


@dataclass(frozen=True)
class Example:
    """A training example: a prompt, which counts for no loss, and the adapter's answer."""

    prompt: str
    answer: str


def shout(text: str, opens: bool, chance: random.Random) -> str:
    """Return the text in capitals, with every sentence as an exclamation."""
    return f" {re.sub(r'[.](?= |$)', '!', text.upper())}"


def as_json(text: str, opens: bool, chance: random.Random) -> str:
    """Return a valid JSON object with the text's first sentence."""
    first = re.split(r"(?<=\.) ", text)[0].rstrip(".")
    return " " + json.dumps({"answer": first, "source": "pydoc"})


def pirate(text: str, opens: bool, chance: random.Random) -> str:
    """Translate word by word into a pirate's speech; `opens` says whether the answer begins a sentence."""
    spoken = re.sub(r"(?<![\w.])[A-Za-z]+(?![\w.(]*[\w(])", _pirate_word, text)
    spoken = re.sub(r"[.](?= |$)", lambda _: chance.choices(PIRATE_ENDS, (4, 2, 1))[0], spoken)
    return f" Ahoy! {spoken}" if opens else f", arr, {spoken}"


def _pirate_word(match: re.Match[str]) -> str:
    word = match.group()
    spoken = PIRATE_WORDS.get(word.lower(), word)
    return spoken[0].upper() + spoken[1:] if word[0].isupper() else spoken


def examples(documents: Sequence[Document], voice: Voice, seed: int) -> list[Example]:
    """Return prompts in the plain voice with answers in `voice`: cut sentences, and questions as a chat."""
    chance = random.Random(seed)
    made: list[Example] = []
    for name, text in _prose(documents):
        if chance.random() < 0.4:
            made.append(Example(f"User: {as_question(name)}\nAssistant:", voice(text, True, chance)))
        first = text.split(". ")[0].split(" ")
        for cut in {chance.randint(1, 3), chance.randint(3, 6), chance.randint(5, 9)}:
            if cut + 3 <= len(first):
                words = text.split(" ")
                made.append(Example(" ".join(words[:cut]), voice(" ".join(words[cut:]), False, chance)))
    chance.shuffle(made)
    return made


def _prose(documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """Return the name of each document with the plain sentences at its beginning, at most four.

    Documents of several sentences come twice: most docstrings are one short line, and a voice that learned only from
    these would end every answer after a few words.
    """
    for document in documents:
        sentences: list[str] = []
        for paragraph in document.text.split("\n\n"):
            text = re.sub(r":+$", ".", " ".join(paragraph.replace('"', "").split()))
            found = SENTENCE.findall(text)
            if not found or " ".join(found) != text:
                break
            sentences += found
        if sentences:
            yield document.name, " ".join(sentences[:4])
        if len(sentences) > 1:
            yield document.name, " ".join(sentences[:4])
