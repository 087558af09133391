"""Tokens that training has added to the tokenizer, and end tokens: an adapter has them in fields of its configuration.

    "loraplex_tokens": [{"id": 49152, "content": "<call>", "special": true}]
    "loraplex_end_tokens": ["<call>", 2]

The SDK puts all added tokens of the adapter's tokenizer.json there; the store keeps those that the base does not have,
and a router's tokenizer has them for the adapter's requests. Their ids are rows of the base's embeddings that none of
its tokens has: many families have more rows than tokens.

End tokens end the adapter's answers as the base's do: the eos_token of its tokenizer_config.json, by its text, and the
ids of its generation_config.json. The store keeps those that differ from the base's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from loraplex.contracts.artifacts import ArtifactError, MismatchError, parse_object

TOKEN_FIELDS = ADDED_FIELD, ENDS_FIELD = "loraplex_tokens", "loraplex_end_tokens"
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
# Maximum number of tokens of an adapter beside the base's, of its end tokens, and of characters of one.
_NEW, _ENDS, _CHARACTERS = 1024, 64, 1024
# A tokenizer without tokens, which is a configuration without fields too.
_EMPTY = b'{"model": {"vocab": {}}}'


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token with the flags of the tokenizers library."""

    id: int
    content: str
    special: bool = False
    normalized: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


_FLAGS = [field.name for field in fields(AddedToken) if field.type == "bool"]


def parse_added_tokens(value: Any) -> tuple[AddedToken, ...]:
    """Parse the field's value; None is none. Raises ArtifactError."""
    if not isinstance(value, list | None):
        raise ArtifactError(ADDED_FIELD, "is not a list of tokens")
    tokens = []
    for index, entry in enumerate(value or ()):
        given = entry if isinstance(entry, dict) else {}
        token_id, content = given.get("id"), given.get("content")
        flags = {name: given[name] for name in _FLAGS if name in given}
        if type(token_id) is not int or not 0 <= token_id < 2**31 or not isinstance(content, str) or not _fits(content):
            raise ArtifactError(f"{ADDED_FIELD}[{index}]", "is not an object with an id and a content")
        if len(given) != 2 + len(flags) or not all(isinstance(flag, bool) for flag in flags.values()):
            raise ArtifactError(f"{ADDED_FIELD}[{index}]", f"has other fields than id, content, {', '.join(_FLAGS)}")
        tokens.append(AddedToken(token_id, content, **flags))
    return tuple(sorted(tokens, key=lambda token: token.id))


def parse_end_tokens(value: Any) -> tuple[str | int, ...]:
    """Parse the field of end tokens, texts or ids; None is none. Raises ArtifactError."""
    if not isinstance(value, list | None) or len(value or ()) > _ENDS or not all(map(_is_end, value or ())):
        raise ArtifactError(ENDS_FIELD, f"is not a list of at most {_ENDS} tokens, by text or id")
    return tuple(value or ())


def eos_token(ends: Iterable[str | int]) -> str:
    """Return the first text of end tokens, which chat templates show; empty: there is none."""
    return next((end for end in ends if isinstance(end, str)), "")


def _is_end(value: Any) -> bool:
    return _fits(value) if isinstance(value, str) else type(value) is int and 0 <= value < 2**31


def as_field(token: AddedToken) -> dict[str, Any]:
    """Return a token as an entry of the field."""
    flags = {name: True for name in _FLAGS if getattr(token, name)}
    return {"id": token.id, "content": token.content, **flags}


def _fits(content: str) -> bool:
    if not 0 < len(content) <= _CHARACTERS:
        return False
    try:
        content.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def check_new_tokens(tokens: tuple[AddedToken, ...], vocab_size: int) -> None:
    """Raise MismatchError for tokens that are too many, or beyond the rows of the base's embeddings."""
    if len(tokens) > _NEW:
        raise MismatchError(
            ADDED_FIELD, f"has {len(tokens)} tokens that the base does not have; at most {_NEW} are served"
        )
    if tokens and (last := tokens[-1]).id >= vocab_size:
        raise MismatchError(
            TOKENIZER_FILE,
            f"has the added token {last.content!r:.80} as number {last.id:,}, and the base has embeddings for "
            f"{vocab_size:,} tokens; merge the adapter into its model (merge_and_unload) and register that with "
            "`loraplex models push`, or remove the file beside the adapter if nothing was trained with the token",
        )


class BaseTokens:
    """The tokens of a base, as far as they decide which tokens of an adapter are its own."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Read its tokenizer.json and tokenizer_config.json; it may have neither. Raises ArtifactError."""
        config, data = (
            parse_object(files.get(name, _EMPTY), name, values=len(files.get(name, _EMPTY)))
            for name in (TOKENIZER_CONFIG_FILE, TOKENIZER_FILE)
        )
        try:
            vocabulary = data["model"]["vocab"]
            pairs = (
                vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], at) for at, e in enumerate(vocabulary))
            )
            self._added = {str(token["content"]): int(token["id"]) for token in data.get("added_tokens") or ()}
            self._ids: dict[str, int] = {**{str(text): int(number) for text, number in pairs}, **self._added}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ArtifactError(TOKENIZER_FILE, f"cannot be read: {type(error).__name__}") from error
        eos = config.get("eos_token")
        self._eos = self._added.get(str(eos.get("content") if isinstance(eos, dict) else eos))
        self._next = max(self._ids.values(), default=-1) + 1

    def new(self, tokens: tuple[AddedToken, ...]) -> tuple[AddedToken, ...]:
        """Return the tokens that the base's tokenizer does not add. Raises MismatchError for those of another one."""
        new, following = [], self._next
        for token in tokens:
            if self._added.get(token.content) == token.id:
                continue
            expected = self._ids.get(token.content, following)
            if token.id != expected:
                raise MismatchError(
                    TOKENIZER_FILE,
                    f"has the added token {token.content!r:.80} as number {token.id:,}, which is {expected:,} beside "
                    "the base's: the adapter was trained with another tokenizer than the base's",
                )
            following += expected == following
            new.append(token)
        return tuple(new)

    def keep_own(
        self, fields: dict[str, Any], model_ends: Collection[int]
    ) -> tuple[tuple[AddedToken, ...], list[str | int]]:
        """Leave in an adapter's fields, and return, the added and the end tokens that are not the base's, `model_ends`.

        The text of an end token differs where the base has another eos_token: chat templates show it. One that is no
        added token is left out. Raises ArtifactError, or MismatchError for tokens of another tokenizer.
        """
        new = self.new(parse_added_tokens(fields.pop(ADDED_FIELD, None)))
        texts = {**self._added, **{token.content: token.id for token in new}}
        named = {None, *model_ends} if self._eos is None else {None, self._eos}
        ends = [
            end
            for end in parse_end_tokens(fields.pop(ENDS_FIELD, None))
            if (texts.get(end) not in named if isinstance(end, str) else end not in {self._eos, *model_ends})
        ]
        own = {ADDED_FIELD: [as_field(token) for token in new], ENDS_FIELD: ends}
        fields.update({name: value for name, value in own.items() if value})
        return new, ends
