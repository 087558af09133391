"""docs/reference/adapter-fields.md has every field of a LoRA configuration that the code and peft know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artifacts import MismatchError
from artifacts.peft_config import ACCEPTED, WHY_REFUSED, parse_peft_config

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "adapter-fields.md"


def rows(title: str) -> list[tuple[str, Any, str]]:
    """Field, example and text of each row of the table under a title."""
    lines = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    cells = [line.strip("|").split(" | ") for line in lines if line.startswith("| `")]
    assert len(cells) > 10, f"the table {title!r} is not there"
    return [(field.strip(" `"), json.loads(example.strip("` ")), text.strip()) for field, example, text in cells]


SERVED, REFUSED = rows("Accepted fields"), rows("Refused fields")


def parse(field: str, value: Any) -> None:
    parse_peft_config(json.dumps({"peft_type": "LORA", "r": 8} | {field: value}).encode())


@pytest.mark.parametrize(("field", "example", "_text"), SERVED)
def test_what_the_page_says_is_accepted_is(field: str, example: Any, _text: str) -> None:
    parse(field, example)


@pytest.mark.parametrize(("field", "example", "text"), REFUSED)
def test_what_the_page_says_is_refused_is_refused_in_these_words(field: str, example: Any, text: str) -> None:
    with pytest.raises(MismatchError) as caught:
        parse(field, example)
    assert (caught.value.subject, caught.value.message) == (field, text)


def test_the_page_has_every_field_that_the_code_knows() -> None:
    assert {field for field, _, _ in SERVED} == ACCEPTED
    assert {field for field, _, _ in REFUSED} >= set(WHY_REFUSED)
    assert not ACCEPTED & set(WHY_REFUSED)


def test_the_page_has_every_field_that_peft_knows() -> None:
    """A field of a later peft has to be understood, and entered here, before it is served."""
    peft = pytest.importorskip("peft")
    on_the_page = {field for field, _, _ in (*SERVED, *REFUSED)}
    assert set(peft.LoraConfig.__dataclass_fields__) <= on_the_page
