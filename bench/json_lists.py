"""Lists in JSON by the whitespace around their items: `python -m bench.json_lists [--quick] [--json FILE]`.

The real model is asked for lists of five things, of texts and of objects, greedily and drawn. A schema allows at most
five items and asks for none, so that the model ends each list itself: too early, where it must write JSON as it has
seldom read it. The default of `json_style` is chosen by this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bench.command import command_parser, run_parsed
from bench.report import Aim, Report, progress
from examples.real import real_model
from loraplex.contracts.grammars.build import json_grammar
from loraplex.contracts.grammars.json_schema import JsonStyle, Whitespace
from loraplex.contracts.options import SamplingParams, StoppingParams
from loraplex.worker.engine.torch_engine import build_engine
from loraplex.worker.engine_api import EngineConfig, NewSequence

TOPICS = (
    "fruits", "European capitals", "programming languages", "dog breeds", "planets", "musical instruments", "sports",
    "colors", "jobs in a hospital", "kitchen tools", "board games", "rivers", "books for children", "vegetables",
    "insects", "car brands", "desserts", "famous painters", "languages", "trees", "birds", "school subjects",
    "countries in Asia", "spices", "oceans and seas", "tools of a carpenter", "hobbies", "breakfast foods", "metals",
    "dances",
)  # fmt: skip
QUICK_TOPICS = 4
ITEMS = 5
_TEXT = {"type": "string", "maxLength": 40}
_OBJECT = {
    "type": "object",
    "properties": {"name": _TEXT, "note": {"type": "string", "maxLength": 80}},
    "required": ["name", "note"],
    "additionalProperties": False,
}
# The schema of an item, and what the prompt says of it.
LISTS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "texts": (_TEXT, ""),
    "objects": (_OBJECT, ", each with a name and a short note"),
}
TEMPERATURES = (0.0, 0.7)
MAX_TOKENS = 400
AIMS = {
    "spaced_items_over_flexible": Aim(at_least=0.95),
    "spaced_tokens_over_flexible": Aim(at_most=0.8),
    "compact_items_over_flexible": Aim(),
}


def main() -> None:
    """Run the benchmark with the command line's arguments."""
    run_parsed(command_parser("json_lists", __doc__ or ""), lambda given: measure(given.quick))


def measure(quick: bool) -> Report:
    """Ask for all lists in each style."""
    topics = TOPICS[:QUICK_TOPICS] if quick else TOPICS
    directory = str(real_model())
    engine = build_engine(EngineConfig(directory, "cpu", "bfloat16", len(topics)))
    rows: list[dict[str, Any]] = []
    try:
        for style in Whitespace:
            for kind in LISTS:
                for temperature in TEMPERATURES:
                    progress(f"{style.name.lower()} {kind} at {temperature}")
                    answers = _answers(engine, directory, topics, kind, style, temperature)
                    rows.append({"style": style.name.lower(), "lists of": kind, "temperature": temperature} | answers)
    finally:
        engine.close()
    return Report(
        name="json_lists",
        command="python -m bench.json_lists" + (" --quick" if quick else ""),
        quick=quick,
        setup={"topics": list(topics), "items": ITEMS, "max_tokens": MAX_TOKENS},
        rows=rows,
        page_rows=[],
        ratios={
            "spaced_items_over_flexible": _over(rows, "spaced", "items"),
            "spaced_tokens_over_flexible": _over(rows, "spaced", "tokens"),
            "compact_items_over_flexible": _over(rows, "compact", "items"),
        },
        aims=AIMS,
    )


def _over(rows: Sequence[Mapping[str, Any]], style: str, figure: str) -> float:
    """Return a style's mean figure over that of flexible whitespace."""
    mean, flexible = (fmean(row[figure] for row in rows if row["style"] == name) for name in (style, "flexible"))
    return mean / flexible


def _answers(
    engine: Any, directory: str, topics: Sequence[str], kind: str, style: Whitespace, temperature: float
) -> dict[str, float]:
    """Return the mean number of items, the number of whole and of cut lists, and the mean tokens of an answer."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    item, said = LISTS[kind]
    things = {"type": "array", "maxItems": ITEMS, "items": item}
    schema = {"type": "object", "properties": {"items": things}, "required": ["items"], "additionalProperties": False}
    grammar = json_grammar(json.dumps(schema), JsonStyle(style))
    ids: dict[str, list[int]] = {}
    for seed, topic in enumerate(topics):
        chat = [{"role": "user", "content": f'List {ITEMS} {topic}{said}, as JSON with the key "items".'}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        sampling, stopping = SamplingParams(temperature=temperature, seed=seed), StoppingParams(MAX_TOKENS)
        engine.add_sequence(NewSequence(topic, tuple(prompt), sampling=sampling, stopping=stopping, grammar=grammar))
        ids[topic] = []
    open_topics = set(topics)
    while open_topics:
        for output in engine.step():
            if output.failure:
                raise RuntimeError(f"the engine failed: {output.failure.message}")
            ids[output.sequence_id] += output.token_ids
            if output.finish is not None:
                open_topics.discard(output.sequence_id)
    counts = []
    for answer in ids.values():
        try:
            counts.append(len(json.loads(tokenizer.decode(answer))["items"]))
        except ValueError:  # cut by max_tokens
            continue
    return {
        "items": fmean(counts),
        "whole lists": counts.count(ITEMS),
        "cut": len(ids) - len(counts),
        "tokens": fmean(map(len, ids.values())),
    }


if __name__ == "__main__":
    main()
