"""The pictures of the load-test page and the gateway's: all there, small enough, and named by what is run for them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench import page_pictures, pictures
from bench.screenshots import NoBrowserError, find_browser, save_picture

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


@pytest.mark.parametrize("dark", [False, True])
def test_a_saved_picture_keeps_the_colours_of_the_lines(tmp_path: Path, dark: bool) -> None:
    """Draw stripes of every colour that fade into the page's, most of them in the first line's colour."""
    style = (DOCS.parent / "clients" / "colours.css").read_text(encoding="utf-8").split("@media")[dark]
    found = re.findall(r"--(\w+): #(\w{6})", style)
    colours = {name: np.frombuffer(bytes.fromhex(value), np.uint8).astype(int) for name, value in found}
    stripes = [*colours.values(), *[colours["c0"]] * 30]
    fading = np.linspace(0, 1, 16)[:, None, None]
    paper = colours["paper"]
    drawn = np.concatenate([colour + (paper - colour) * fading * np.ones((1, 400, 1)) for colour in stripes])
    png = io.BytesIO()
    Image.fromarray(drawn.astype(np.uint8)).save(png, "PNG")
    save_picture(png.getvalue(), tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as saved:
        kept = np.unique(np.asarray(saved.convert("RGB"), int).reshape(-1, 3), axis=0)
    for name, colour in colours.items():
        assert np.abs(kept - colour).max(axis=1).min() <= 4, name
