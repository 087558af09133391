"""The state of an answer inside its grammar is a function of its ids."""

from __future__ import annotations

import json
from random import Random

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest

from loraplex.contracts.artifacts.hash_model import parse_hash_model
from loraplex.contracts.grammars.build import (
    SPACES,
    behind_reasoning,
    json_grammar,
    lark_grammar,
    regex_grammar,
    space_bound,
)
from loraplex.contracts.grammars.json_schema import JsonStyle, Whitespace
from loraplex.contracts.grammars.matching import Vocabulary, compile_grammar, hash_vocabulary, read_vocabulary
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine.scheduling.grammars import GrammarState
from tests.drawn_schemas import byte_tokenizer, draw_schema
from tests.hash_formats import ASCII_CALLS, GRAMMARS, or_calls

END_LESS = hash_vocabulary(parse_hash_model("hash:?vocab=600"))
ENDING = hash_vocabulary(parse_hash_model("hash:?vocab=600&end_after=9"))
BYTES = read_vocabulary(byte_tokenizer(320).encode(), 320, {2})
# A short block of reasoning, which a slash ends.
THOUGHT = "start: thought answer\nthought[lazy]: /[^\\/]{0,9}\\//\n"
LETTERS = {letter: i for i in range(320) for letter in [BYTES.tokens.decode_bytes([i])] if len(letter) == 1}
NOTHING = frozenset[int]()


def begin(grammar: str, vocabulary: Vocabulary, *, hides_end: bool = False, ends: tuple[int, ...] = ()) -> GrammarState:
    matcher = compile_grammar(vocabulary.tokens, grammar)
    return GrammarState(matcher, vocabulary, StoppingParams(ignore_eos=hides_end, end_ids=ends))


@pytest.mark.parametrize("seed", range(12))
def test_the_mask_after_a_replay_is_the_mask_before_the_crash(seed: int) -> None:
    """With every kind of format and vocabulary; the replay is of a copy, as a cached grammar's is."""
    chance = Random(seed)
    grammars = [*filter(None, GRAMMARS.values()), json_grammar(json.dumps(draw_schema(chance)))]
    grammars.append(or_calls(chance.choice(grammars), chance.choice(ASCII_CALLS)))
    grammars += [behind_reasoning(THOUGHT, grammar) for grammar in grammars]
    vocabulary = chance.choice([END_LESS, ENDING, BYTES])
    stopping = StoppingParams(ignore_eos=chance.random() < 0.5)
    for grammar in grammars:
        compiled = compile_grammar(vocabulary.tokens, grammar)
        state = GrammarState(compiled.deep_copy(), vocabulary, stopping)
        ids: list[int] = []
        while not state.complete and len(ids) < 40:
            banned = frozenset(chance.sample(range(vocabulary.size), 3))
            allowed = state.allowed_ids(banned)
            replayed = GrammarState(compiled.deep_copy(), vocabulary, stopping)
            assert replayed.replay(ids) is None
            assert np.array_equal(replayed.allowed_ids(banned), allowed)
            assert not replayed.complete
            ids.append(int(chance.choice(allowed)))
            assert state.advance(ids[-1]) is None


@pytest.mark.parametrize("seed", range(6))
def test_ids_are_forced_where_every_answer_goes_on_with_their_text(seed: int) -> None:
    """And to look for them, or to check a draft, changes no state."""
    chance, lengths = Random(seed), list[int]()
    for grammar in (json_grammar(json.dumps(draw_schema(chance))), regex_grammar("one( two| three){2} and no more")):
        state, ids = begin(grammar, BYTES), list[int]()
        while not state.complete and len(ids) < 60:
            allowed, mask = state.allowed_ids(NOTHING), np.zeros(BYTES.words, np.int32)
            state.fill(mask)
            state.trim(mask, NOTHING)
            forced = state.forced_ids(mask)
            lengths.append(len(forced))
            assert state.forced_ids(mask, 0.0) == []
            assert state.valid(forced) == forced
            assert list(state.valid([*forced[:2], 2, 5])) == forced[:2]
            assert np.array_equal(state.allowed_ids(NOTHING), allowed)
            # However it goes on.
            ahead, text, expected = state.copy(), b"", b"".join(text_of(BYTES, token) for token in forced)
            while not ahead.complete and len(text) < len(expected):
                token = int(chance.choice(ahead.allowed_ids(NOTHING)))
                text += text_of(BYTES, token)
                assert ahead.advance(token) is None
            assert text.startswith(expected)
            ids.append(int(chance.choice(allowed)))
            assert state.advance(ids[-1]) is None
    assert max(lengths) > 4, "something was to be forced"


@pytest.mark.parametrize("reasoned", [False, True])
def test_whitespace_is_bounded_over_the_whole_answer(reasoned: bool) -> None:
    """By the most that a model can write; it goes on without, and spaces in strings and in reasoning do not count."""
    item = ' a\\" b  '
    schema = {"type": "array", "items": {"const": item}, "minItems": 30, "maxItems": 30}
    grammar = json_grammar(json.dumps(schema), JsonStyle(Whitespace.FLEXIBLE))
    grammar = behind_reasoning(THOUGHT, grammar) if reasoned else grammar
    bound = compile_grammar(BYTES.tokens, space_bound(grammar))
    state = GrammarState(compile_grammar(BYTES.tokens, grammar), BYTES, StoppingParams(), bound)
    data = bytearray()
    for letter in (b" ", b" ", b"/") if reasoned else ():
        assert state.advance(LETTERS[letter]) is None
    while not state.complete:
        allowed = {BYTES.tokens.decode_bytes([int(token)]): int(token) for token in state.allowed_ids(NOTHING)}
        text = b" " if b" " in allowed else min(allowed, key=lambda one: (len(one), one))
        assert state.advance(allowed[text]) is None
        data += text
    value = json.loads(data)
    assert value == [item] * 30
    assert len(data) - len(json.dumps(value, separators=(",", ":"))) == SPACES
    assert space_bound(json_grammar(json.dumps(schema))) == ""


@pytest.mark.parametrize("vocabulary", [END_LESS, ENDING, BYTES])
def test_an_answer_ends_when_nothing_may_follow(vocabulary: Vocabulary) -> None:
    for hides_end in (False, True):
        state = begin(regex_grammar("ab{1,2}"), vocabulary, hides_end=hides_end)
        for _ in "abb":
            assert not state.complete
            letter = next(int(token) for token in state.allowed_ids(NOTHING) if token not in vocabulary.end_ids)
            assert state.advance(letter) is None
        assert state.complete


def test_the_end_token_is_allowed_where_the_answer_may_end() -> None:
    (end,) = ENDING.end_ids
    state = begin(regex_grammar("a+"), ENDING)
    assert end not in state.allowed_ids(NOTHING)
    state.advance(ord("a"))
    assert state.allowed_ids(NOTHING).tolist() == [ord("a"), end]
    # Banned by min_tokens, hidden by ignore_eos.
    assert state.allowed_ids(frozenset({end})).tolist() == [ord("a")]
    hidden = begin(regex_grammar("a+"), ENDING, hides_end=True)
    hidden.advance(ord("a"))
    assert hidden.allowed_ids(NOTHING).tolist() == [ord("a")]
    # A banned stop token is allowed where there is nothing else: the format goes first.
    assert state.allowed_ids(frozenset({end, ord("a")})).tolist() == [ord("a"), end]
    assert state.advance(end) is None
    assert state.complete


@pytest.mark.parametrize("vocabulary", [END_LESS, ENDING, BYTES])
def test_an_adapters_end_token_ends_the_answer_where_the_models_may(vocabulary: Vocabulary) -> None:
    bound = compile_grammar(vocabulary.tokens, space_bound(json_grammar("{}", JsonStyle(Whitespace.FLEXIBLE))))
    own = 301
    for letters, bounds in ((b"a", None), (b'"a"', bound)):
        matcher = compile_grammar(vocabulary.tokens, regex_grammar("a+" if len(letters) == 1 else '"a+"[ ]*'))
        state = GrammarState(matcher, vocabulary, StoppingParams(end_ids=(own, *vocabulary.end_ids)), bounds)
        for letter in letters:
            assert own not in state.allowed_ids(NOTHING)
            token = next(int(one) for one in state.allowed_ids(NOTHING) if text_of(vocabulary, one) == bytes([letter]))
            assert state.advance(token) is None
        assert {own, *vocabulary.end_ids} < set(state.allowed_ids(NOTHING).tolist())
        assert own not in state.allowed_ids(frozenset({own}))
        assert state.advance(own) is None
        assert state.complete
    hidden = begin(regex_grammar("a+"), vocabulary, hides_end=True, ends=(own,))
    assert hidden.advance(next(int(one) for one in hidden.allowed_ids(NOTHING))) is None
    assert own not in hidden.allowed_ids(NOTHING)


def text_of(vocabulary: Vocabulary, token: int) -> bytes:
    return bytes(vocabulary.tokens.decode_bytes([int(token)]))


def test_an_id_that_the_grammar_does_not_allow_fails_the_answer() -> None:
    failure = begin(regex_grammar("a+"), END_LESS).replay([ord("a"), ord("b")])
    assert failure is not None
    assert (failure.code, failure.reason, failure.field) == ("INVALID_ARGUMENT", "GRAMMAR_FAILED", "format")


def test_an_answer_that_cannot_go_on_fails() -> None:
    state = begin(lark_grammar('start: "a" B\nB: /b/ & /c/'), END_LESS)
    state.advance(ord("a"))
    assert not len(state.allowed_ids(NOTHING))
    assert "nothing after this answer" in state.problem().message


@pytest.mark.parametrize(
    ("rules", "written", "most"),
    [
        ('start: s\ns: s s | "a" | "b"', "ab", 200),
        ('start: e\ne: e "+" e | e "*" e | e "-" e | "(" e ")" | N\nN: /[0-9]+/', "1+2*(3)-", 900),
        ('start: s\ns: s s | s s s | s s s s | "a" | "b"', "ab", 40),
    ],
)
def test_an_answer_that_has_many_readings_fails_before_they_take_long(rules: str, written: str, most: int) -> None:
    """At the same id in each attempt, whatever the time: the parser's unfinished rules are counted."""
    ends = []
    for _ in range(2):
        state, mask = begin(lark_grammar(rules), BYTES), np.zeros(BYTES.words, np.int32)
        for place, letter in enumerate(written * 200):
            if failure := state.advance(LETTERS[letter.encode()]):
                ends.append(place)
                break
            state.fill(mask)
        assert failure is not None
        assert failure.reason == "GRAMMAR_FAILED"
        assert "more than 256 unfinished rules at one place; repeat with + or *" in failure.message
    assert ends[0] == ends[1] <= most


@pytest.mark.parametrize(
    ("rules", "written"),
    [
        ('start: s+\ns: "a" | "b"', "ab"),
        ('start: e\ne: t (("+" | "*" | "-") t)*\nt: "(" e ")" | N\nN: /[0-9]+/', "1+2*(3)-"),
        ('start: l\nl: WORD "," l | WORD\nWORD: /[a-z]+/', "one,two,"),
    ],
)
def test_an_answer_with_one_reading_may_be_long(rules: str, written: str) -> None:
    state, mask = begin(lark_grammar(rules), BYTES), np.zeros(BYTES.words, np.int32)
    for letter in written * 300:
        assert state.advance(LETTERS[letter.encode()]) is None
        state.fill(mask)


def test_answers_in_tokens_of_sentencepiece_decode_to_their_format() -> None:
    """Spaces are other letters there, and a byte may be a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *bytes_, "\u2581", *map(chr, range(33, 127)), "\u2581a", "\u2581{", "ab", "\u00e9", '":', '"}']
    merges = [("\u2581", "a"), ("\u2581", "{"), ("a", "b"), ('"', ":"), ('"', "}")]
    vocabulary_ = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary_, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    vocabulary = read_vocabulary(tokenizer.to_str().encode(), len(tokens), {2})
    chance = Random(3)
    for _ in range(20):
        schema = draw_schema(chance)
        state = begin(json_grammar(json.dumps(schema)), vocabulary)
        ids: list[int] = []
        while not state.complete:
            ids.append(int(chance.choice(state.allowed_ids(NOTHING))))
            assert state.advance(ids[-1]) is None
        jsonschema.validate(json.loads(tokenizer.decode([1, *ids])), schema)
