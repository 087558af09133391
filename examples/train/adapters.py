"""Trains the example adapters on the finished base model: rank 16, every linear layer, about a minute or two each.

Each learns a voice, one way of rewriting the documentation: capitals, JSON, a pirate. So nobody needs to read
closely to tell which adapter answered.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from examples.train.base import learning_rate, loss_of
from examples.train.corpus import Document, as_question, load_documents

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
BASE_NAME = "loraplex-tiny"
TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
ROWS = 16
LONGEST = 160
IGNORED = -100


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
    pairs: list[Example] = []
    for name, text in _prose(documents):
        if chance.random() < 0.4:
            pairs.append(Example(f"User: {as_question(name)}\nAssistant:", voice(text, True, chance)))
        first = text.split(". ")[0].split(" ")
        for cut in {chance.randint(1, 3), chance.randint(3, 6), chance.randint(5, 9)}:
            if cut + 3 <= len(first):
                words = text.split(" ")
                pairs.append(Example(" ".join(words[:cut]), voice(" ".join(words[cut:]), False, chance)))
    chance.shuffle(pairs)
    return pairs


def _prose(documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """Return the name of each document with the plain sentences at its beginning, at most four.

    Documents of several sentences come twice: most docstrings are one short line, and a voice that learned only from
    these would end every answer after a few words.
    """
    for document in documents:
        sentences: list[str] = []
        for paragraph in document.text.split("\n\n"):
            text = re.sub(r":+$", ".", " ".join(paragraph.replace('"', "").split()))
            parts = SENTENCE.findall(text)
            if not parts or " ".join(parts) != text:
                break
            sentences += parts
        if sentences:
            yield document.name, " ".join(sentences[:4])
        if len(sentences) > 1:
            yield document.name, " ".join(sentences[:4])


# Training steps of each voice: JSON is learnt quickly, spelling every word in capitals is not.
VOICES: dict[str, tuple[Voice, int]] = {
    "acme/shout": (shout, 900),
    "globex/json": (as_json, 400),
    "initech/pirate": (pirate, 600),
}


def tokenize(tokenizer: Tokenizer, pairs: Sequence[Example]) -> list[tuple[list[int], int]]:
    """Return each example as (prompt ids + answer ids + end token, length of the prompt), cut at `LONGEST` ids."""
    encoded = []
    for example in pairs:
        prompt = tokenizer.encode(example.prompt).ids
        answer = tokenizer.encode(example.answer).ids
        encoded.append(((prompt + answer + [0])[:LONGEST], len(prompt)))
    return encoded


def batch_of(rows: Sequence[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids padded on the right, and labels that ignore prompt and padding. Both (rows, longest), int64."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORED)
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt : len(tokens)] = torch.tensor(tokens[prompt:])
    return ids, labels


def train(name: str, voice: Voice, steps: int, arguments: argparse.Namespace) -> None:
    """Train one adapter from a fresh start and save it under `--out`/`name`."""
    documents, _ = load_documents(arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.base / "tokenizer.json"))
    encoded = tokenize(tokenizer, examples(documents, voice, arguments.seed))
    base = LlamaForCausalLM.from_pretrained(arguments.base, dtype=torch.float32)
    torch.manual_seed(arguments.seed)
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], weight_decay=0.0)
    chance = random.Random(arguments.seed)
    started = time.monotonic()
    smooth = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, arguments.learning_rate, warm_up=20)
        loss = loss_of(model, *batch_of(chance.sample(encoded, ROWS)))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.95 * smooth + 0.05 * loss.item()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"{name} step {step + 1} loss {smooth:.3f} {time.monotonic() - started:.0f} s", flush=True)
    save(model, arguments.out / name, BASE_NAME)


def save(model: PeftModel, folder: Path, base_name: str) -> None:
    """Write a peft directory in bfloat16 that names its base by a name, never by this machine's path."""
    shutil.rmtree(folder, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = base_name
    model.bfloat16()
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "adapter_model.safetensors").chmod(0o644)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    config["target_modules"] = sorted(config["target_modules"])  # peft keeps a set, whose order changes by run
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Read the flags and train the adapters one after the other."""
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base", type=Path, default=root / "model", help="directory of the trained base model")
    parser.add_argument("--out", type=Path, default=root / "adapters", help="directory to write TENANT/NAME under")
    parser.add_argument("--only", choices=sorted(VOICES), action="append", help="train only these; repeatable")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of {ROWS} examples each, for all alike")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak of the cosine schedule")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, examples and batches")
    arguments = parser.parse_args()
    for name in arguments.only or VOICES:
        voice, steps = VOICES[name]
        train(name, voice, arguments.steps or steps, arguments)


if __name__ == "__main__":
    main()
