"""The list of families: what is not on it is refused by name, and docs/reference/models.md shows what is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from loraplex.checkpoints.text_models import WHY_REFUSED, WRAPPERS, WRAPPERS_REFUSED
from loraplex.contracts.artifacts.encoders import ENCODERS
from loraplex.contracts.artifacts.families import FAMILIES
from loraplex.worker.engine.model.loader import SUPPORTED, check_architecture
from loraplex.worker.engine_api import ModelUnusableError


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["Llama4ForCausalLM"]},
            "Llama4ForCausalLM is not supported: its window or chunks are in the",
        ),
        (
            {"architectures": ["BertLMHeadModel"]},
            "BertLMHeadModel is not supported; supported are ApertusForCausalLM, ",
        ),
        ({"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True}, "use_sliding_window of this Qwen2Moe"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "attends in both directions"),
    ],
)
def test_what_would_be_answered_wrongly_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnusableError, match=message):
        check_architecture(config)


def test_none_is_both_served_and_refused() -> None:
    assert not SUPPORTED & set(WHY_REFUSED)
    assert len(FAMILIES) == len(SUPPORTED) >= 30


def listed(model_type: str, title: str) -> str:
    """Return a family as the page lists it: with its title where the type does not say it."""
    is_said = re.sub(r"[\W_]", "", title.lower()) == model_type.replace("_", "")
    return f"`{model_type}`" if is_said else f"`{model_type}` ({title})"


def test_the_page_has_the_tables() -> None:
    dense, experts = (
        ", ".join(listed(one.model_type, one.title) for one in FAMILIES.values() if one.experts == of) + "."
        for of in (False, True)
    )
    encoders = [
        f"| {one.title} | `{one.model_type}` | {quoted(one.architectures)} | {quoted(one.head.modules)} |"
        for one in ENCODERS.values()
    ]
    refused = [
        f"| {why} | {quoted(name for name in WHY_REFUSED if WHY_REFUSED[name] == why)} |"
        for why in dict.fromkeys(WHY_REFUSED.values())
    ]
    root = Path(__file__).parents[4]
    page = (root / "docs" / "reference" / "models.md").read_text()
    of_wrappers = [
        f"| {why} | {quoted(name for name in WRAPPERS_REFUSED if WRAPPERS_REFUSED[name] == why)} |"
        for why in dict.fromkeys(WRAPPERS_REFUSED.values())
    ]
    assert tables(page) == [encoders, refused, of_wrappers], "write the tables of docs/reference/models.md anew"
    text = page.replace("\n", " ")
    assert f"**Dense**, by `model_type`: {dense} " in text
    assert ", ".join(listed(name, title) for name, title in WRAPPERS.items()) in text
    assert f"**Mixtures of experts**: {experts} " in text
    assert f"{len(FAMILIES)} families" in (root / "README.md").read_text()


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def tables(page: str) -> list[list[str]]:
    """The rows of each table, without its two first lines."""
    return [block.splitlines()[2:] for block in page.split("\n\n") if block.startswith("| ")]
