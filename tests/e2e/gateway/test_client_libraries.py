"""The scripts of those client libraries that are installed here; `make clients` tries all, in their newest versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster
from tests.trials.libraries.library import LIBRARIES, ROOT


@pytest.mark.parametrize("name", ["openai", "anthropic", "huggingface_hub"])
@pytest.mark.asyncio(loop_scope="package")
async def test_scripts(cluster: Cluster, tmp_path: Path, name: str) -> None:
    (library,) = (library for library in LIBRARIES if library.name == name)
    outcomes = await library.outcomes(sys.executable, tmp_path, f"http://{cluster.local.http}", "hash")
    assert set(outcomes.values()) == {""}, outcomes


def test_the_page_has_the_versions_that_are_tried() -> None:
    page = (ROOT / "docs/reference/http.md").read_text(encoding="utf-8")
    _, section = page.split("\n## Client libraries\n")
    rows = re.findall(r"^- `(\S+)`(?: of npm)? ([\d.]+): ", section, re.MULTILINE)
    tried = [library for library in LIBRARIES if library.packages]
    assert rows == [(re.split("==|@", library.packages[0])[0], library.version) for library in tried]
