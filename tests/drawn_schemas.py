"""JSON schemas drawn from a seed, whose answers come to an end soon; and a tokenizer of bytes for tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]


def draw_schema(chance: Random) -> Schema:
    """Draw the schema of an object with some properties."""
    return _object(chance, 2)


def _object(chance: Random, depth: int) -> Schema:
    names = [f"{letter}{chance.randrange(10)}" for letter in "abcd"[: chance.randint(1, 3)]]
    properties = {name: _value(chance, depth - 1) for name in names}
    required = [name for name in names if chance.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(chance: Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    return {"type": "array", "items": _value(chance, depth - 1), "minItems": least, "maxItems": least + 2}


def _text(chance: Random, depth: int) -> Schema:
    kind = chance.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": chance.choice(["^[a-z]{2,6}$", "^(ab|cd){1,3}$", "^[A-Z][0-9]{3}$"])}
    if kind == 1:
        return {"type": "string", "format": chance.choice(["date", "time", "ipv4", "uuid", "date-time"])}
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)}


def _number(chance: Random, depth: int) -> Schema:
    least = chance.randint(-50, 50)
    whole: Schema = {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 500)}
    return chance.choice([whole, whole | {"multipleOf": 1}, {"type": "integer", "exclusiveMinimum": 0, "maximum": 99}])


def _choice(chance: Random, depth: int) -> Schema:
    return chance.choice(
        [
            {"enum": ["red", 'a "quoted" \\ text', 7, None, [1, 2], {"k": "v"}]},
            {"const": 'ünï "cö" \\ de'},
            {"type": "boolean"},
            {"anyOf": [_number(chance, depth), {"type": "null"}]},
            {"type": ["boolean", "null"]},
        ]
    )


def _value(chance: Random, depth: int) -> Schema:
    kinds: list[Callable[[Random, int], Schema]] = [_text, _number, _choice]
    return chance.choice(kinds + [_object, _array] * (depth > 0))(chance, depth)


def byte_tokenizer(size: int) -> str:
    """Return a tokenizer.json: ids 0 to 2 are special (pad, begin, end), then bytes, then pairs of letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    pairs = [(first, second) for first in '":,{}[]' for second in 'abcdefgh"'][: size - len(letters) - len(special)]
    tokens = [*special, *letters, *(first + second for first, second in pairs)]
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=pairs)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    text = tokenizer.to_str()
    json.loads(text)
    return text
