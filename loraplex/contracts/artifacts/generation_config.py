"""The sampling that a base model's authors propose, from its generation_config.json.

Its values are for the fields that a request leaves unset; `router.generation.admission` fills them in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_float
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from loraplex.contracts.artifacts import ArtifactError, parse_object
from loraplex.contracts.options import OutOfRangeError, SamplingParams, check_sampling

GENERATION_CONFIG = "generation_config.json"
# Values that only shape how a token is drawn, so that they mean nothing where tokens are not drawn.
_DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_SAMPLING = (*_DRAWING, "repetition_penalty")
# The largest number of an unsigned integer of 32 bits, in which messages carry counts.
_LARGEST = (1 << 32) - 1
_CORRECT = "correct it or take it out"


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _LARGEST


class _Expected(NamedTuple):
    """The type of a field in the file, in words, and the test of a value."""

    words: str
    fits: Callable[[Any], bool]


_NUMBER = _Expected("a number", lambda value: type(value) is float or _is_integer(value))
_COUNT = _Expected("a whole number of at most 32 bits", _is_integer)
_EXPECTED = {
    "do_sample": _Expected("true or false", lambda value: isinstance(value, bool)),
    "top_k": _COUNT,
    "max_new_tokens": _COUNT,
}


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The fields of a generation_config.json that say how to sample, under their own names; None where it has none."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> GenerationConfig:
        """Return a configuration of values by name; other names, and those of later versions, are left out."""
        return cls(**{one.name: values[one.name] for one in fields(cls) if values.get(one.name) is not None})

    @property
    def given(self) -> dict[str, Any]:
        """Return the fields that are given, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the values of SamplingParams' fields that requests get which leave these unset.

        As in transformers tokens are drawn only with do_sample, then at temperature 1 if the file has no other.
        """
        if not self.do_sample:
            return {name: value for name, value in self._of_sampling.items() if name not in _DRAWING}
        return {"temperature": 1.0} | self._of_sampling

    @property
    def text(self) -> str:
        """Return what requests get that leave everything unset, to be shown; empty: what they get of any model."""
        lengths = {} if self.max_new_tokens is None else {"max_tokens": self.max_new_tokens}
        shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in self.sampling.items()}
        return ", ".join(f"{name} {value}" for name, value in (shown | lengths).items())

    @property
    def _of_sampling(self) -> dict[str, Any]:
        """Return the given values of sampling as requests carry them, whose numbers have 32 bits."""
        return {
            name: value if name == "top_k" else c_float(value).value
            for name, value in self.given.items()
            if name in _SAMPLING
        }

    def check(self) -> None:
        """Raise OutOfRangeError for the first field whose value means nothing."""
        check_sampling(SamplingParams(**self._of_sampling))
        if self.max_new_tokens is not None and not 1 <= self.max_new_tokens <= _LARGEST:
            raise OutOfRangeError("max_new_tokens", f"{self.max_new_tokens} is not between 1 and {_LARGEST}")


# Of a model whose files say nothing of sampling.
UNSAID = GenerationConfig()


def read_generation_config(files: Mapping[str, bytes]) -> GenerationConfig:
    """Return what the generation_config.json among a model's files says. Raises ArtifactError, naming the field."""
    config = GenerationConfig.of(parse_object(files.get(GENERATION_CONFIG, b"{}"), GENERATION_CONFIG))
    for name, value in config.given.items():
        if not (expected := _EXPECTED.get(name, _NUMBER)).fits(value):
            raise ArtifactError(GENERATION_CONFIG, f"{name}: {str(value)[:40]!r} is not {expected.words}; {_CORRECT}")
    if config.top_k == -1:  # vLLM's word for no limit
        config = replace(config, top_k=0)
    try:
        config.check()
    except OutOfRangeError as error:
        raise ArtifactError(GENERATION_CONFIG, f"{error}; {_CORRECT}") from error
    return config
