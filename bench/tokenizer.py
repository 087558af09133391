"""Byte-level BPE tokenizers of any size for models with random weights, made on the spot.

The merges are learned from Python's own documentation. Further tokens, as in tokenizers of 100,000 and more: words of
the standard library's sources with and without a leading space and capitals, digits, CJK characters and emoji.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from pydoc_data import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_TOKEN, END_ID = "<|end|>", 0

# Maximum number of tokens that are learned. More cost seconds, and 465,000 characters teach few more.
_LEARNED = 8_192
# Code points of common CJK ideographs, kana and hangul, and of emoji.
_IDEOGRAPHS = (range(0x4E00, 0x9000), range(0x3041, 0x30FF), range(0xAC00, 0xB800))
_EMOJI = (range(0x1F300, 0x1F650), range(0x1F680, 0x1F6C0), range(0x2600, 0x27C0))
_WORD = re.compile(r"[A-Za-z]{2,16}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{3,20}")
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def save_tokenizer(size: int, directory: Path) -> None:
    """Write a tokenizer of `size` tokens, at least 300, as transformers does; the first is the end token."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=min(size, _LEARNED),
        special_tokens=[AddedToken(END_TOKEN, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train_from_iterator(topics.topics.values(), trainer)
    vocabulary = learned.get_vocab()
    if size > len(vocabulary):
        _fill(vocabulary, size)
    # A whole word in the vocabulary is one token, without merges that lead to it.
    whole = Tokenizer(models.BPE(vocabulary, _merges(learned), ignore_merges=True))
    whole.add_special_tokens([END_TOKEN])
    whole.pre_tokenizer = learned.pre_tokenizer
    whole.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token=END_TOKEN)  # type: ignore[no-untyped-call]
    fast.save_pretrained(directory)


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]


def _fill(vocabulary: dict[str, int], size: int) -> None:
    for text in _further_tokens():
        vocabulary.setdefault(_BYTES.pre_tokenize_str(text)[0][0], len(vocabulary))
        if len(vocabulary) == size:
            return
    raise ValueError(f"the standard library's sources give {len(vocabulary)} tokens, not {size}")


def _further_tokens() -> Iterator[str]:
    """Yield the texts of tokens, the most useful first."""
    yield from ("".join(digits) for count in (2, 3) for digits in product("0123456789", repeat=count))
    yield from map(chr, chain(*_IDEOGRAPHS, *_EMOJI))
    words, names = _counted()
    for word in words:
        yield from (f" {word}", word, f" {word.title()}", word.title(), f" {word.upper()}", word.upper())
    for name in names:
        yield from (f" {name}", name)


def _counted() -> tuple[list[str], list[str]]:
    """Return the words and the names of the standard library's sources, the commonest first."""
    words, names = Counter[str](), Counter[str]()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        words.update(word.lower() for word in _WORD.findall(source))
        names.update(_NAME.findall(source))
    return [word for word, _ in words.most_common()], [name for name, _ in names.most_common()]
