"""The plans file: what it says, and what it is refused for."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest

from loraplex.contracts.plans import FIELDS, PlansError, PlansFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plans.toml"


def test_the_page_has_an_example_and_every_field(path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/quotas.md").read_text()
    example = re.search(r"\$ cat plans.toml\n(.*?)\n    \$ ", page, re.DOTALL)
    assert example
    path.write_text(textwrap.dedent(example[1]))
    assert PlansFile(path).content["tenants/acme"].weight == 3
    assert re.findall(r"^- `(\w+)`:", page, re.MULTILINE) == list(FIELDS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tenants.acme]\ntokens_per_week = 1", "tenants.acme.tokens_per_week: not a field of a plan"),
        ("[tenants.acme]\ntokens_per_day = -1", "tenants.acme.tokens_per_day: -1 is not a whole number from 0 to"),
        ("[default]\npriority_ceiling = -101", "default.priority_ceiling: -101 is not a whole number from -100 to"),
        ("[tenants.acme]\ntokens_per_day = 1.5", "tenants.acme.tokens_per_day: 1.5 is not a whole number"),
        ("[default]\ntokens_per_day = true", "default.tokens_per_day: True is not a number"),
        ("[default]\nweight = 0", "default.weight: 0 is not from 0.001 to 1000"),
        ("[Acme]", "Acme: write [default], [tenants.NAME] or"),
        ("tenants = 3", "tenants: write [tenants.NAME]"),
        ("[tenants]\nacme = 3", "tenants.acme: write [tenants.acme]"),
        ("[default]\nqueue_share = 1.5", "default.queue_share: 1.5 is not a share"),
        ("[keys.k1]\nweight = 0.0001", "keys.k1.weight: 0.0001 is not from 0.001 to 1000"),
        ("[keys.k1]\nweight = -1", "keys.k1.weight: -1 is not from 0.001 to 1000"),
        ("[keys.k1]\nqueue_share = 0", "keys.k1.queue_share: 0 is not a share"),
        ("keys = 3", "keys: write [keys.KEYID]"),
        ("[", "no TOML"),
    ],
)
def test_a_fault_is_named(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(PlansError, match=message.replace("[", r"\[").replace("]", r"\]")):
        PlansFile(path)


def test_a_change_is_read_and_a_faulty_one_is_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("[tenants.acme]\nconcurrent_streams = 1\n")
    file, write = PlansFile(path), path.write_text
    write("[tenants.acme]\nconcurrent_streams = 3\n")
    assert file.look()
    write("[tenants.acme]\nconcurrent_streams = many\n")
    assert not file.look()
    os.unlink(path)
    assert not file.look()
    assert not file.look()
    assert file.content["tenants/acme"].concurrent_streams == 3
    assert len([record for record in caplog.records if "the former content" in record.message]) == 2
    write("[tenants.acme]\nconcurrent_streams = 4\n")
    assert file.look()
