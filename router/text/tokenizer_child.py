"""Try out the tokenizer files of a base model, as a child process of rpc.children that works on one and ends.

What kills, hangs or blows up this process is not loaded by the router: files may be made for that, and the library
panics, recurses and backtracks on some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.text.panics import panics_as_errors
from router.text.tokenizer_text import TokenizerText
from rpc.children.child import LAST, Json, serve

# Maximum processor time in seconds, and address space in bytes. A tokenizer of 128,000 tokens takes 0.3 s and 110 MB.
CPU_S = 20.0
MEMORY_BYTES = 4 << 30
# Texts of a few characters first, then of 2,000, which a router tokenizes on its event loop; each also with an end that
# makes a regular expression try again. And the most tokens that a character may be.
_PIECES = ("a", " ", "1", "\n", "-", "é", "<", "The 2 cats' toys, \n\tsaid she. ", "日本", "🙂", "\u0301", "aA1 ")
_SAMPLES = tuple(
    (piece * size)[:size] + end for size in (1, 20, 2_000) for piece in _PIECES for end in ("", "!", "\u2028")
)
_TOKENS_A_CHARACTER = 32
# Maximum characters that a token of an answer may be.
_CHARACTERS_A_TOKEN = 65_536


def _answer(request: Mapping[str, Any]) -> Json:
    """Return nothing but the mark of the last answer, or why the files cannot be used."""
    try:
        with panics_as_errors():
            _try_out({name: text.encode() for name, text in request["files"].items()})
    except MemoryError:
        return {"error": "needs too much memory", LAST: True}
    except Exception as error:  # anybody may have written the files
        return {"error": f"{type(error).__name__}: {error}"[:300], LAST: True}
    return {LAST: True}


def _try_out(files: Mapping[str, bytes]) -> None:
    text = TokenizerText(files)
    for sample in _SAMPLES:
        ids = text.encode(sample, special_tokens=True)
        if len(ids) > _TOKENS_A_CHARACTER * len(sample):
            raise ValueError(f"makes {len(ids)} tokens of {len(sample)} characters")
        if len(shown := text.decode(ids, skip_special_tokens=False)) > _CHARACTERS_A_TOKEN * len(ids):
            raise ValueError(f"makes {len(shown)} characters of {len(ids)} tokens")


if __name__ == "__main__":
    serve(_answer, cpu_s=lambda request: CPU_S, memory_bytes=MEMORY_BYTES)
