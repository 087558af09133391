from __future__ import annotations

from loraplex.gateway.openai_completions import text_offsets


def test_offsets_count_characters_whatever_their_tokens() -> None:
    text = "a\U0001f600b é"
    assert text_offsets([byte.to_bytes(1, "big") for byte in text.encode()], 3) == [3, 4, 5, 5, 5, 5, 6, 7, 8]
    assert [text[at - 3] for at in text_offsets([one.encode() for one in text], 3)] == list(text)
    assert text_offsets([], 3) == []
