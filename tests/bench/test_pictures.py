"""The pictures of the load-test page and the gateway's: all there, small enough, and named by what is run for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import page_pictures, pictures
from bench.screenshots import NoBrowserError, find_browser

DOCS = Path(__file__).parents[2] / "docs"


def test_every_picture_of_the_pages_is_there_and_small() -> None:
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("loadtest.md", "http.md"))
    named = re.findall(r"\((plots/[\w.-]+)\)", pages)
    assert len(named) >= 12
    assert {f"plots/{name}.png" for name, _, _ in page_pictures.PICTURES} <= set(named)
    for name in named:
        assert 1_000 < (DOCS / name).stat().st_size <= pictures.MOST_BYTES, name
    made = {f"plots/loadtest-{kept}.svg" for one in pictures.EXPERIMENTS for _, kept in one.plots}
    assert made <= set(named)


def test_every_experiment_is_a_file_of_the_examples() -> None:
    for experiment in pictures.EXPERIMENTS:
        assert (pictures.EXAMPLES / "loadtest" / experiment.file).is_file()


def test_without_a_browser_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoBrowserError, match="no browser: none of chromium, "):
        find_browser()
